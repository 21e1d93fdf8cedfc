//! The pass that carries events to those who watch for them.

use chrono::{DateTime, Utc};
use holdfast_engine::{
    content::Digest,
    ids::{MailId, SessionId},
    mail::{MailBody, Priority, Sender},
    waking::WakeClass,
    watching::Filter,
};
use serde_json::Value;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::{
    Store,
    errors::StoreError,
    letters::{Ask, Letter, Locked, LockedRun, MAILBOX_LIMIT, lock_own, lock_run, plain, take_in},
    retry::against_rivals,
    sql,
    transaction::{Parameters, Transaction, Writes, parameters},
    waking,
};

/// How many events one transaction looks at.
pub const EVENTS_AT_ONCE: i64 = 100;

/// Bytes of an event's data that a letter repeats; of more, it has the beginning, as text.
pub const DATA_LIMIT: usize = 8 * 1024;

/// Carries on up to `limit` watches that have something to do, each in a transaction of its own. Returns how many
/// it did something for. A watch whose mailbox is full isn't among them; one that can't be carried on is logged,
/// and tried again after a minute.
///
/// # Errors
/// [`StoreError::Unavailable`]; what was passed on before stays so.
pub async fn forward(store: &Store, limit: i64) -> Result<u64, StoreError> {
    let due: Vec<(SessionId, Uuid)> = {
        let client = store.client().await?;
        let find = client.prepare_cached(sql::DUE_WATCHES).await?;
        let rows = client.query(&find, &[&limit, &MAILBOX_LIMIT]).await?;
        rows.iter()
            .map(|row| Ok((SessionId(row.try_get(0)?), row.try_get(1)?)))
            .collect::<Result<_, StoreError>>()?
    };
    let mut count = 0;
    for (watcher, id) in due {
        match against_rivals(|| forward_once(store, watcher, id)).await {
            Ok(Some(ask)) => {
                if let Some(ask) = ask {
                    store.announce(watcher, ask != Ask::Nothing);
                }
                count += 1;
            }
            Ok(None) => {}
            Err(error) if error.is_unavailable() => return Err(error),
            // One watch that can't be carried on holds up no other.
            Err(error) => {
                tracing::error!(%error, session_id = %watcher, "a watch can't be carried on");
                let client = store.client().await?;
                let put_off = client.prepare_cached(sql::PUT_OFF_WATCH).await?;
                client.execute(&put_off, &[&watcher.0, &id]).await?;
            }
        }
    }
    Ok(count)
}

/// `None` if there was nothing to do; else which run was asked for, if letters were sent.
async fn forward_once(
    store: &Store,
    watcher: SessionId,
    id: Uuid,
) -> Result<Option<Option<Ask>>, StoreError> {
    let tx = Transaction::over(store.client().await?);
    tx.prepare(&[sql::LOCK_SESSION, sql::LOCK_RUN, sql::LOCK_WATCH]).await?;
    let find: Parameters<'_> = &[&watcher.0, &id];
    let locked =
        async { futures::try_join!(tx.begin(), lock_own(&tx, watcher, None), lock_run(&tx, watcher)) };
    let (session, run) = match locked.await {
        Ok(((), session, run)) => (session, run),
        Err(StoreError::UnknownSession) => {
            let gone = tx.execute(sql::DELETE_WATCH, find).await?;
            tx.commit(Writes::default()).await?;
            return Ok((gone > 0).then_some(None));
        }
        Err(error) => return Err(error),
    };
    let Some(row) = tx.query_opt(sql::LOCK_WATCH, find).await? else { return Ok(None) };
    let watch = Held::read(&row)?;
    let events = tx.query(sql::EVENTS_AFTER, &[&watch.watched.0, &watch.cursor, &EVENTS_AT_ONCE]).await?;
    let unread: i64 = tx.query_one(sql::COUNT_UNREAD, &[&watcher.0]).await?.try_get(0)?;
    let mut found = watch.look(id, &events, MAILBOX_LIMIT - unread)?;
    drop_known(&tx, watcher, &mut found.letters).await?;
    let ends = watch.overdue || (found.whole && (watch.expired || watch.orphaned));
    if !ends && found.cursor == watch.cursor {
        return Ok(None);
    }
    let mut writes = Writes::default();
    match ends {
        true => writes.push(sql::DELETE_WATCH, parameters![watcher.0, id]),
        false => writes.push(sql::MOVE_WATCH, parameters![watcher.0, id, found.cursor]),
    }
    let asked = take_letters(&tx, &mut writes, &session, run.as_ref(), found.letters).await?;
    tx.commit(writes).await?;
    Ok(Some(asked))
}

/// Puts letters into a locked mailbox, as mail that a tool of its session has asked for.
async fn take_letters(
    tx: &Transaction,
    writes: &mut Writes<'_>,
    session: &Locked,
    run: Option<&LockedRun>,
    letters: Vec<Letter>,
) -> Result<Option<Ask>, StoreError> {
    if letters.is_empty() {
        return Ok(None);
    }
    let terms = waking::terms(tx, &[session.id]).await?.remove(&session.id).unwrap_or_default();
    let ask = waking::ask(tx, &terms, session, run, WakeClass::Tool).await?;
    take_in(writes, session, run, letters, ask, None)?;
    Ok(Some(ask))
}

/// Leaves out what is there already: a watch that was started again under its old id.
async fn drop_known(
    tx: &Transaction,
    watcher: SessionId,
    letters: &mut Vec<Letter>,
) -> Result<(), StoreError> {
    if letters.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = letters.iter().map(|letter| letter.id.0).collect();
    let known = tx.query(sql::KNOWN_MAIL, &[&watcher.0, &ids]).await?;
    let known: Vec<Uuid> = known.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
    letters.retain(|letter| !known.contains(&letter.id.0));
    Ok(())
}

/// A watch, its row locked.
struct Held {
    watched: SessionId,
    filter: Filter,
    cursor: i64,
    expires_at: DateTime<Utc>,
    /// Its time is over.
    expired: bool,
    /// It has been for a day, and what it still has to say won't be read.
    overdue: bool,
    /// The watched session is gone.
    orphaned: bool,
}

/// What a look at the watched session's events gave.
struct Found {
    letters: Vec<Letter>,
    cursor: i64,
    /// Whether all that the watch may pass on was looked at.
    whole: bool,
}

impl Held {
    fn read(row: &Row) -> Result<Self, StoreError> {
        let kinds: Vec<String> = row.try_get("kinds")?;
        let filter = Filter::new(&kinds, row.try_get("tool")?);
        Ok(Self {
            watched: SessionId(row.try_get("watched")?),
            filter: filter.map_err(|error| StoreError::Corrupt(format!("watch: {error}")))?,
            cursor: row.try_get("cursor")?,
            expires_at: row.try_get("expires_at")?,
            expired: row.try_get("expired")?,
            overdue: row.try_get("overdue")?,
            orphaned: row.try_get("orphaned")?,
        })
    }

    /// Goes through events as far as there is room for letters.
    fn look(&self, id: Uuid, events: &[Row], mut room: i64) -> Result<Found, StoreError> {
        let page = i64::try_from(events.len()).is_ok_and(|count| count >= EVENTS_AT_ONCE);
        let mut found = Found { letters: Vec::new(), cursor: self.cursor, whole: !page };
        for event in events {
            if event.try_get::<_, DateTime<Utc>>("at")? > self.expires_at {
                found.whole = true;
                break;
            }
            let (seq, kind): (i64, &str) = (event.try_get("seq")?, event.try_get("kind")?);
            let text: &str = event.try_get("body")?;
            let body: Value = serde_json::from_str(text)?;
            if self.filter.matches(kind, &body) {
                if room <= 0 {
                    found.whole = false;
                    break;
                }
                room -= 1;
                let data = if text.len() > DATA_LIMIT { plain(text, DATA_LIMIT).into() } else { body };
                found.letters.push(self.letter(id, seq, kind, data));
            }
            found.cursor = seq;
        }
        Ok(found)
    }

    fn letter(&self, watch: Uuid, seq: i64, kind: &str, data: Value) -> Letter {
        Letter {
            id: letter_id(watch, seq),
            from: Sender::System { source: "watch".to_owned() },
            priority: Priority::Normal,
            hops: 0,
            body: MailBody::WatchedEvent { session_id: self.watched, event: kind.to_owned(), data },
        }
    }
}

/// The id of the letter that tells a watch's event, the same whenever it is made.
fn letter_id(watch: Uuid, seq: i64) -> MailId {
    let digest = Digest::of(format!("watch {watch} {seq}").as_bytes()).0;
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    MailId(Uuid::new_v8(bytes))
}
