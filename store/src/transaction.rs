//! Transactions whose BEGIN and COMMIT cost no round trip of their own: BEGIN goes out with the first
//! reads and locks behind it, COMMIT right behind the last writes.

use std::{
    pin::Pin,
    sync::atomic::{AtomicBool, Ordering},
    task::Poll,
    time::Duration,
};

use deadpool_postgres::{Client, Object};
use tokio_postgres::{Row, Statement, types::ToSql};

use crate::{counters::COUNTERS, errors::StoreError, outage, plant};

/// Parameters of a statement that is awaited.
pub(crate) type Parameters<'a> = &'a [&'a (dyn ToSql + Sync)];

/// A parameter that [`Writes`] keep.
pub(crate) type Parameter<'a> = Box<dyn ToSql + Sync + Send + 'a>;

/// How long a connection may take to roll back an abandoned transaction before it is given up: it may be
/// waiting for somebody's lock, and whoever gets it next must not wait with it.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(3);

/// Boxes values as the parameters of a write.
macro_rules! parameters {
    ($($value:expr),* $(,)?) => {
        vec![$(Box::new($value) as $crate::transaction::Parameter<'_>),*]
    };
}
pub(crate) use parameters;

/// The writes that end a transaction, in the order in which they are sent. All are sent before the first
/// is answered, so none can depend on another's answer.
#[derive(Default)]
pub(crate) struct Writes<'a> {
    statements: Vec<(&'static str, Vec<Parameter<'a>>)>,
    /// How many events of sessions are among what they write.
    pub(crate) events: usize,
}

impl<'a> Writes<'a> {
    pub(crate) fn push(&mut self, statement: &'static str, parameters: Vec<Parameter<'a>>) {
        self.statements.push((statement, parameters));
    }
}

/// A transaction over a pooled connection. Dropping it rolls it back.
pub(crate) struct Transaction {
    /// There until it is dropped.
    client: Option<Client>,
    /// Whether BEGIN has been sent and nothing that ends it has been answered.
    open: AtomicBool,
}

impl Transaction {
    /// One that hasn't begun.
    pub(crate) fn over(client: Client) -> Self {
        Self { client: Some(client), open: AtomicBool::new(false) }
    }

    /// Begins, and waits until it has begun.
    pub(crate) async fn begun(client: Client) -> Result<Self, StoreError> {
        let tx = Self::over(client);
        tx.begin().await?;
        Ok(tx)
    }

    /// Sends BEGIN. Statements that only read and lock may be sent behind it at once if they are
    /// [prepared](Self::prepare): were BEGIN refused, they would do no harm. Nothing may be written
    /// before this has returned: each write would be a transaction of its own.
    pub(crate) async fn begin(&self) -> Result<(), StoreError> {
        self.open.store(true, Ordering::Relaxed);
        self.batch_execute("BEGIN").await
    }

    /// Prepares statements, so that those which are sent without waiting for one another keep their
    /// order on a new connection too.
    pub(crate) async fn prepare(&self, statements: &[&'static str]) -> Result<(), StoreError> {
        for statement in statements {
            self.prepared(statement).await?;
        }
        Ok(())
    }

    pub(crate) async fn query(
        &self,
        statement: &'static str,
        parameters: Parameters<'_>,
    ) -> Result<Vec<Row>, StoreError> {
        let statement = self.prepared(statement).await?;
        Ok(self.client()?.query(&statement, parameters).await?)
    }

    pub(crate) async fn query_opt(
        &self,
        statement: &'static str,
        parameters: Parameters<'_>,
    ) -> Result<Option<Row>, StoreError> {
        Ok(self.query(statement, parameters).await?.pop())
    }

    pub(crate) async fn query_one(
        &self,
        statement: &'static str,
        parameters: Parameters<'_>,
    ) -> Result<Row, StoreError> {
        let missing = || StoreError::Corrupt("a statement that always gives a row gave none".to_owned());
        self.query_opt(statement, parameters).await?.ok_or_else(missing)
    }

    pub(crate) async fn execute(
        &self,
        statement: &'static str,
        parameters: Parameters<'_>,
    ) -> Result<u64, StoreError> {
        let statement = self.prepared(statement).await?;
        Ok(self.client()?.execute(&statement, parameters).await?)
    }

    /// Sends statements that take no parameters and aren't worth preparing.
    pub(crate) async fn batch_execute(&self, statements: &str) -> Result<(), StoreError> {
        Ok(self.client()?.batch_execute(statements).await?)
    }

    /// Sends the last writes and COMMIT behind them. If one of them fails, the server makes a ROLLBACK of
    /// COMMIT: all is stored, or nothing.
    pub(crate) async fn commit(self, writes: Writes<'_>) -> Result<(), StoreError> {
        self.commit_after(writes, std::future::ready(())).await
    }

    /// As [`Self::commit`], but COMMIT goes out after `before`; the writes don't wait for that.
    pub(crate) async fn commit_after(
        self,
        writes: Writes<'_>,
        before: impl Future<Output = ()>,
    ) -> Result<(), StoreError> {
        let client = self.client()?;
        let mut statements = Vec::with_capacity(writes.statements.len());
        for (statement, parameters) in &writes.statements {
            let parameters: Vec<&(dyn ToSql + Sync)> =
                parameters.iter().map(|parameter| &**parameter as &(dyn ToSql + Sync)).collect();
            statements.push((self.prepared(statement).await?, parameters));
        }
        let mut answers: Vec<Pin<Box<_>>> = Vec::with_capacity(statements.len());
        for (statement, parameters) in &statements {
            // A prepared statement is on its way once its future has been polled.
            let mut answer = Box::pin(client.execute(statement, parameters));
            match futures::poll!(answer.as_mut()) {
                Poll::Ready(done) => drop(done?),
                Poll::Pending => answers.push(answer),
            }
        }
        before.await;
        let mut committed = Box::pin(client.batch_execute("COMMIT"));
        let at_once = futures::poll!(committed.as_mut());
        for answer in answers {
            answer.await?;
        }
        match at_once {
            Poll::Ready(done) => done?,
            Poll::Pending => committed.await?,
        }
        self.open.store(false, Ordering::Relaxed);
        COUNTERS.events_written.add(writes.events as u64);
        outage::worked();
        Ok(())
    }

    /// Ends it without a trace.
    pub(crate) async fn rollback(&self) -> Result<(), StoreError> {
        self.batch_execute("ROLLBACK").await?;
        self.open.store(false, Ordering::Relaxed);
        Ok(())
    }

    async fn prepared(&self, statement: &'static str) -> Result<Statement, StoreError> {
        // Boxed: preparing is a large future, and stands in every future that uses this.
        Ok(Box::pin(self.client()?.prepare_cached(plant::altered(statement))).await?)
    }

    fn client(&self) -> Result<&Client, StoreError> {
        self.client.as_ref().ok_or_else(|| StoreError::Unavailable("the connection is gone".to_owned()))
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        let Some(client) = self.client.take() else { return };
        if !self.open.load(Ordering::Relaxed) {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            drop(Object::take(client));
            return;
        };
        // Back to the pool when it is clean. Behind COMMIT this is a warning and nothing else.
        runtime.spawn(async move {
            let rolled_back = tokio::time::timeout(ROLLBACK_TIMEOUT, client.batch_execute("ROLLBACK")).await;
            if !matches!(rolled_back, Ok(Ok(()))) {
                drop(Object::take(client));
            }
        });
    }
}
