//! Sessions on their way in, in groups, as letters are: those that come while a transaction is under way share the next
//! one, one statement a table. A lone one waits for nobody.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use holdfast_engine::{
    decide::Mode,
    ids::{CallId, SessionId},
};
use tokio::sync::{Semaphore, mpsc};
use uuid::Uuid;

use crate::{
    Store,
    accept::{Caller, Message, admit, user_letter},
    errors::StoreError,
    idempotency::{self, Done, Key},
    letters::{Ask, Beginning, Locked, begin, insert_blobs, intake, lock_sessions},
    retry::against_rivals,
    room::{self, Room},
    sql,
    transaction::{Parameters, Transaction, Writes, parameters},
};

/// Sessions that one transaction creates at the most.
pub const MAX_GROUP: usize = 64;

/// How many sessions of groups that failed are created at once, each by itself.
const ALONE_AT_ONCE: usize = 4;

/// Bytes of messages' blobs beyond which a group takes no further session in.
const GROUP_BYTES: usize = 4 * 1024 * 1024;

/// A session to create.
#[derive(Debug, Clone)]
pub struct NewSession {
    /// Its id.
    pub id: SessionId,
    /// Its owner; empty where clients don't name themselves.
    pub owner: String,
    /// Its agent's slug.
    pub agent: String,
    /// The session it belongs to.
    pub parent: Option<SessionId>,
    /// The call of the parent that it answers.
    pub parent_call: Option<CallId>,
    /// Labels, for finding it.
    pub labels: BTreeMap<String, String>,
    /// Where it stands among its owner's runs; higher first.
    pub priority: i16,
    /// The first message.
    pub message: Option<Message>,
    /// How far it runs.
    pub run: Mode,
}

impl NewSession {
    fn blob_bytes(&self) -> usize {
        self.message.iter().flat_map(|message| &message.blobs).map(|blob| blob.text.len()).sum()
    }
}

/// A session on its way in.
#[derive(Debug)]
pub(crate) struct Request {
    new: NewSession,
    traceparent: Option<String>,
}

/// Where sessions are created.
pub(crate) type Nursery = Room<Request, ()>;

type Waiting = room::Waiting<Request, ()>;

/// Creates a session, with its first message and run.
///
/// # Errors
/// [`StoreError::UnknownAgent`]; [`StoreError::UnknownSession`] if the parent isn't the owner's;
/// [`StoreError::Backlog`] if it is to run and too many of the owner's runs wait.
pub async fn create(store: &Store, caller: &Caller, new: NewSession) -> Result<Done<SessionId>, StoreError> {
    let runs = new.run != Mode::None && new.message.is_some();
    if runs {
        admit(store, caller, &new.owner, None).await?;
    }
    let (id, owner) = (new.id, new.owner.clone());
    let announces = new.run != Mode::None || new.message.is_some();
    let key = caller.key.as_ref();
    let request = Request { new, traceparent: caller.traceparent.clone() };
    // What waits for somebody's lock, be it of a key or a parent, keeps nobody else waiting.
    if key.is_some() || request.new.parent.is_some() {
        match against_rivals(|| Box::pin(alone(store, &request, key))).await? {
            Done::Now(()) => {}
            Done::Before { code, resource } => return Ok(Done::Before { code, resource }),
        }
    } else {
        store.nursery.ask(request, |arriving| run(store.without_rooms(), arriving)).await?;
    }
    store.announce(id, announces);
    if runs {
        store.backlog.queued(&owner);
    }
    Ok(Done::Now(id))
}

async fn run(store: Store, mut arriving: mpsc::Receiver<Waiting>) {
    let alone_at_once = Arc::new(Semaphore::new(ALONE_AT_ONCE));
    while let Some(first) = arriving.recv().await {
        // Those that the last group has just answered get to speak: what they create next may join this one.
        tokio::task::yield_now().await;
        let group = next_group(first, &mut arriving);
        // A task of its own, so that a panic costs one group and not those behind it.
        if let Err(error) = tokio::spawn(take_group(store.clone(), group, Arc::clone(&alone_at_once))).await {
            tracing::error!(%error, "creating a group of sessions panicked");
        }
    }
}

/// Sessions for one transaction, as many as have come.
fn next_group(first: Waiting, arriving: &mut mpsc::Receiver<Waiting>) -> Vec<Waiting> {
    let (mut group, mut bytes) = (Vec::new(), 0_usize);
    let mut next = Some(first);
    while let Some(waiting) = next {
        if !waiting.answer.is_closed() {
            bytes = bytes.saturating_add(waiting.request.new.blob_bytes());
            group.push(waiting);
        }
        next = if group.len() < MAX_GROUP && bytes < GROUP_BYTES { arriving.try_recv().ok() } else { None };
    }
    group
}

/// Creates a group. If that fails as a whole, each is created by itself, so that only the culprit fails; those that
/// come later don't wait for that.
async fn take_group(store: Store, group: Vec<Waiting>, alone_at_once: Arc<Semaphore>) {
    if group.is_empty() {
        return;
    }
    let taken = {
        let requests: Vec<&Request> = group.iter().map(|waiting| &waiting.request).collect();
        Box::pin(take_in(&store, &requests, None)).await
    };
    match taken {
        Ok(Done::Now(taken)) => {
            for (waiting, created) in group.into_iter().zip(taken) {
                // Nobody may be waiting any more.
                let _ = waiting.answer.send(created);
            }
        }
        // Whether they are there nobody knows.
        Err(StoreError::Unavailable(why)) => {
            for waiting in group {
                let _ = waiting.answer.send(Err(StoreError::Unavailable(why.clone())));
            }
        }
        Ok(Done::Before { .. }) | Err(_) => {
            for waiting in group {
                let (store, places) = (store.clone(), Arc::clone(&alone_at_once));
                tokio::spawn(async move {
                    // The semaphore is never closed.
                    let _place = places.acquire_owned().await;
                    let created = against_rivals(|| Box::pin(alone(&store, &waiting.request, None))).await;
                    let _ = waiting.answer.send(created.map(|_| ()));
                });
            }
        }
    }
}

async fn alone(store: &Store, request: &Request, key: Option<&Key>) -> Result<Done<()>, StoreError> {
    match take_in(store, &[request], key).await? {
        Done::Now(mut taken) => taken.pop().unwrap_or(Err(StoreError::Rival)).map(Done::Now),
        Done::Before { code, resource } => Ok(Done::Before { code, resource }),
    }
}

/// Creates sessions, in one transaction; one that is refused changes nothing.
async fn take_in(
    store: &Store,
    requests: &[&Request],
    key: Option<&Key>,
) -> Result<Done<Vec<Result<(), StoreError>>>, StoreError> {
    let tx = Transaction::over(store.client().await?);
    tx.prepare(&[sql::CURRENT_AGENTS, sql::LOCK_SESSION]).await?;
    let slugs: Vec<&str> = requests.iter().map(|request| request.new.agent.as_str()).collect();
    let parents: Vec<SessionId> = requests.iter().filter_map(|request| request.new.parent).collect();
    let slugs: Parameters<'_> = &[&slugs];
    let reads = async {
        let parents =
            async { if parents.is_empty() { Ok(Vec::new()) } else { lock_sessions(&tx, &parents).await } };
        futures::try_join!(tx.query(sql::CURRENT_AGENTS, slugs), parents)
    };
    let resource = requests.first().map(|request| request.new.id.to_string()).unwrap_or_default();
    let (agents, parents) = match idempotency::begin(&tx, key, &resource, reads).await? {
        Done::Now(read) => read,
        Done::Before { code, resource } => return Ok(Done::Before { code, resource }),
    };
    let mut revisions: HashMap<String, String> = HashMap::new();
    for row in agents {
        revisions.insert(row.try_get(0)?, row.try_get(1)?);
    }
    let prepared: Vec<Result<New<'_>, StoreError>> =
        requests.iter().map(|request| New::of(request, &revisions, &parents)).collect();
    let news: Vec<&New<'_>> = prepared.iter().filter_map(|new| new.as_ref().ok()).collect();
    if news.is_empty() {
        tx.rollback().await?;
    } else {
        let mut writes = Writes::default();
        write(&mut writes, &news)?;
        tx.commit(writes).await?;
    }
    Ok(Done::Now(prepared.into_iter().map(|new| new.map(|_| ())).collect()))
}

/// A session that nothing speaks against.
struct New<'a> {
    new: &'a NewSession,
    revision: &'a str,
    root: Uuid,
    labels: String,
    begins: Beginning<'a>,
}

impl<'a> New<'a> {
    fn of(
        request: &'a Request,
        revisions: &'a HashMap<String, String>,
        parents: &[Locked],
    ) -> Result<Self, StoreError> {
        let new = &request.new;
        let root = match new.parent {
            None => new.id.0,
            Some(id) => {
                let parent = parents.iter().find(|parent| parent.id == id);
                let own = parent.filter(|parent| !parent.deleted && parent.owner == new.owner);
                own.ok_or(StoreError::UnknownSession)?.root
            }
        };
        let revision =
            revisions.get(&new.agent).ok_or_else(|| StoreError::UnknownAgent(new.agent.clone()))?;
        let session = Locked { event_seq: 1, ..Locked::fresh(new.id, &new.owner, root) };
        let letters = new.message.iter().map(|message| user_letter(message, &new.owner)).collect();
        let ask = match new.run {
            _ if new.message.is_none() => Ask::Nothing,
            // Folding shows the message as the session's first turn although nobody answers it yet.
            Mode::None => Ask::Fold,
            mode => Ask::Run(mode),
        };
        let begins = Beginning {
            session: new.id,
            owner: &new.owner,
            intake: intake(&session, None, letters, ask),
            traceparent: request.traceparent.as_deref(),
        };
        Ok(Self { new, revision, root, labels: serde_json::to_string(&new.labels)?, begins })
    }
}

fn write<'a>(writes: &mut Writes<'a>, news: &[&'a New<'a>]) -> Result<(), StoreError> {
    fn column<'a, T>(news: &[&'a New<'a>], pick: impl Fn(&'a New<'a>) -> T) -> Vec<T> {
        news.iter().map(|new| pick(new)).collect()
    }
    writes.push(
        sql::INSERT_SESSIONS,
        parameters![
            column(news, |new| new.new.id.0),
            column(news, |new| new.new.owner.as_str()),
            column(news, |new| new.new.agent.as_str()),
            column(news, |new| new.revision),
            column(news, |new| new.new.parent.map(|parent| parent.0)),
            column(news, |new| new.new.parent_call.map(|call| call.0)),
            column(news, |new| new.root),
            column(news, |new| new.begins.intake.status.word()),
            column(news, |new| new.new.priority),
            column(news, |new| new.labels.as_str()),
            column(news, |new| new.begins.intake.mail_seq),
            column(news, |new| new.begins.intake.event_seq),
        ],
    );
    begin(writes, news.iter().map(|new| &new.begins))?;
    let blobs_of = |new: &&'a New<'a>| {
        let (owner, message) = (new.new.owner.as_str(), &new.new.message);
        message.iter().flat_map(|message| &message.blobs).map(move |blob| (owner, blob))
    };
    insert_blobs(writes, news.iter().flat_map(blobs_of));
    Ok(())
}
