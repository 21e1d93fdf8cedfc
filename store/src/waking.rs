//! Whether a letter starts a run: by what its sender asks for, or by what the recipient's agent says of mail of
//! its class. Decided when it is accepted, under the session's lock.

use std::collections::HashMap;

use holdfast_engine::{
    decide::Mode,
    ids::SessionId,
    mail::{Control, MailBody},
    session::Hold,
    waking::{WakeClass, Waking},
};

use tokio_postgres::Row;
use uuid::Uuid;

use crate::{
    errors::StoreError,
    letters::{Ask, Locked, LockedRun, corrupt},
    sql,
    transaction::Transaction,
};

/// What decides whether a letter starts a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Its sender: orders, and requests of people.
    By(Ask),
    /// The recipient's agent, for mail of this class.
    As(WakeClass),
}

impl From<Ask> for Wake {
    fn from(ask: Ask) -> Self {
        Self::By(ask)
    }
}

impl From<WakeClass> for Wake {
    fn from(class: WakeClass) -> Self {
        Self::As(class)
    }
}

/// What the current revisions of sessions' agents say of mail; nothing of those that go by the defaults.
pub(crate) async fn terms(
    tx: &Transaction,
    sessions: &[SessionId],
) -> Result<HashMap<SessionId, Waking>, StoreError> {
    let ids: Vec<Uuid> = sessions.iter().map(|id| id.0).collect();
    let class = |word: &str| WakeClass::parse(word).ok_or_else(|| corrupt("class of mail", word));
    let of_row = |row: &Row| {
        let words: Vec<&str> = row.try_get("wake_on")?;
        let waking = Waking {
            wake_on: words.into_iter().map(class).collect::<Result<_, StoreError>>()?,
            resume_on_any_mail: row.try_get("resume_on_any_mail")?,
        };
        Ok((SessionId(row.try_get("id")?), waking))
    };
    tx.query(sql::WAKE_TERMS, &[&ids]).await?.iter().map(of_row).collect()
}

/// Which run mail of a class asks for, of a session that is locked with its run.
pub(crate) async fn ask(
    tx: &Transaction,
    terms: &Waking,
    session: &Locked,
    run: Option<&LockedRun>,
    class: WakeClass,
) -> Result<Ask, StoreError> {
    if terms.resume_on_any_mail
        && (session.hold == Hold::Paused || is_about_to_pause(tx, session, run).await?)
    {
        return Ok(Ask::Run(Mode::UntilBlocked));
    }
    Ok(match terms.wake_on.contains(&class) {
        true => Ask::GoOn,
        // It starts no run, but it may be what the model waits for.
        false if run.is_some_and(|run| run.waits) => Ask::Fold,
        false => Ask::Nothing,
    })
}

/// Whether a run has an order to pause that it hasn't obeyed: what comes after the order lifts it.
async fn is_about_to_pause(
    tx: &Transaction,
    session: &Locked,
    run: Option<&LockedRun>,
) -> Result<bool, StoreError> {
    if run.is_none() {
        return Ok(false);
    }
    let order = |message| serde_json::to_string(&MailBody::Control { message });
    let (pause, resume) = (order(Control::Pause)?, order(Control::Resume)?);
    let row =
        tx.query_opt(sql::LAST_HOLD_ORDER, &[&session.id.0, &[pause.as_str(), &resume].as_slice()]).await?;
    Ok(row.map(|row| row.try_get::<_, String>(0)).transpose()?.is_some_and(|last| last == pause))
}
