//! Watches: events of one session that come to another one's mailbox, for a while.
//!
//! A watch is a row with a cursor. Nothing is done where events happen; [`forward`], a pass of the scheduler,
//! finds the watches whose session has gone on and writes what they want to know into their watchers' mailboxes.

use std::time::Duration;

use chrono::{DateTime, Utc};
use holdfast_engine::{
    ids::SessionId,
    scope::Scope,
    watching::{Filter, FilterError},
};
use tokio_postgres::Row;
use uuid::Uuid;

mod forward;

pub use forward::{DATA_LIMIT, EVENTS_AT_ONCE, forward};

use crate::{
    Store,
    errors::StoreError,
    kin::{self, Address, KinError, LEVELS},
    letters::lock_sessions,
    retry::against_rivals,
    sql,
    transaction::{Transaction, Writes},
};

/// How many watches a session may have.
pub const WATCHES_LIMIT: i64 = 32;

/// How long a watch lasts unless it says otherwise.
pub const DEFAULT_TTL: Duration = Duration::from_secs(600);

/// How long it may last, at least and at most.
pub const TTL_RANGE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(24 * 60 * 60));

/// A watch to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewWatch {
    /// Its id among its watcher's; a repeat of it is the same watch.
    pub id: Uuid,
    /// Who watches.
    pub watcher: SessionId,
    /// Whom.
    pub watched: Address,
    /// Kinds of events; see [`holdfast_engine::watching::KINDS`].
    pub kinds: Vec<String>,
    /// A glob: of events that name a tool, only the ones whose tool it matches.
    pub tool: Option<String>,
    /// How long it lasts, [`TTL_RANGE`]; [`DEFAULT_TTL`] unless given.
    pub ttl: Option<Duration>,
    /// Whom the watcher's agent may watch.
    pub scope: Scope,
}

/// A watch as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watch {
    /// Its id among its watcher's.
    pub id: Uuid,
    /// Whom it watches.
    pub watched: SessionId,
    /// Kinds of events that it passes on.
    pub kinds: Vec<String>,
    /// Which tools, where events name one.
    pub tool: Option<String>,
    /// When it ends.
    pub expires_at: DateTime<Utc>,
}

/// Why a watch can't be started.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// There is no such session, or it is another owner's, or deleted.
    #[error("there is no such session")]
    UnknownSession,
    /// The session is out of reach.
    #[error("that session is outside the scope {scope}", scope = .0.word())]
    NotPermitted(Scope),
    /// Several sessions in reach have ids that end so.
    #[error("several sessions end in {0}; name one by its whole id")]
    Ambiguous(String),
    /// What is to be watched for can't happen.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// It would last for too short or too long.
    #[error("a watch lasts 1 second to 24 hours")]
    BadTtl,
    /// The session has as many watches as it may.
    #[error("a session has at most {limit} watches; stop one first")]
    TooMany {
        /// How many it may have.
        limit: i64,
    },
    /// The watched session, or one that it watches, watches this one: each event would lead to the next.
    #[error("that session watches this one, itself or by others that it watches")]
    Circle,
    /// What the database says.
    #[error(transparent)]
    Store(StoreError),
}

impl WatchError {
    /// A word for it that doesn't change.
    pub fn code(&self) -> &'static str {
        match self {
            Self::UnknownSession => "unknown_session",
            Self::NotPermitted(_) => "not_permitted",
            Self::Ambiguous(_) => "ambiguous_session",
            Self::Filter(_) => "bad_filter",
            Self::BadTtl => "bad_ttl",
            Self::TooMany { .. } => "too_many_watches",
            Self::Circle => "watch_circle",
            Self::Store(error) if error.is_unavailable() => "unavailable",
            Self::Store(_) => "internal",
        }
    }
}

impl From<KinError> for WatchError {
    fn from(error: KinError) -> Self {
        match error {
            KinError::Unknown => Self::UnknownSession,
            KinError::NotPermitted(scope) => Self::NotPermitted(scope),
            KinError::Ambiguous(end) => Self::Ambiguous(end),
            KinError::Store(error) => error.into(),
        }
    }
}

impl From<StoreError> for WatchError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::UnknownSession => Self::UnknownSession,
            error => Self::Store(error),
        }
    }
}

/// Starts a watch: from now on, events of the watched session come to the watcher's mailbox.
///
/// # Errors
/// [`WatchError`]; then there is no new watch. A repeat is answered with the watch that there is.
pub async fn start(store: &Store, owner: &str, new: &NewWatch) -> Result<Watch, WatchError> {
    Filter::new(&new.kinds, new.tool.as_deref())?;
    let ttl = new.ttl.unwrap_or(DEFAULT_TTL);
    if ttl < TTL_RANGE.0 || ttl > TTL_RANGE.1 {
        return Err(WatchError::BadTtl);
    }
    let (watched, _) = kin::find(store, owner, new.watcher, &new.watched, new.scope).await?;
    if watched == new.watcher {
        return Err(WatchError::Circle);
    }
    let begun = against_rivals(|| start_once(store, owner, new, watched, ttl)).await?;
    begun.map_err(|refused| match refused {
        Refused::TooMany => WatchError::TooMany { limit: WATCHES_LIMIT },
        Refused::Circle => WatchError::Circle,
    })
}

enum Refused {
    TooMany,
    Circle,
}

async fn start_once(
    store: &Store,
    owner: &str,
    new: &NewWatch,
    watched: SessionId,
    ttl: Duration,
) -> Result<Result<Watch, Refused>, StoreError> {
    let tx = Transaction::begun(store.client().await?).await?;
    tx.query(sql::LOCK_WATCHES, &[&owner]).await?;
    let (mut watcher_is_there, mut cursor) = (false, None);
    for session in lock_sessions(&tx, &[new.watcher, watched]).await? {
        let own = session.owner == owner && !session.deleted;
        watcher_is_there |= own && session.id == new.watcher;
        cursor = cursor.or((own && session.id == watched).then_some(session.event_seq));
    }
    if !watcher_is_there {
        return Err(StoreError::UnknownSession);
    }
    if let Some(row) = tx.query_opt(sql::FIND_WATCH, &[&new.watcher.0, &new.id]).await? {
        return Ok(Ok(watch(new.id, &row)?));
    }
    let cursor = cursor.ok_or(StoreError::UnknownSession)?;
    let count: i64 = tx.query_one(sql::COUNT_WATCHES, &[&new.watcher.0]).await?.try_get(0)?;
    if count >= WATCHES_LIMIT {
        return Ok(Err(Refused::TooMany));
    }
    let circle = tx.query_one(sql::WATCH_CIRCLE, &[&watched.0, &new.watcher.0, &LEVELS]).await?;
    if circle.try_get(0)? {
        return Ok(Err(Refused::Circle));
    }
    let mut kinds = new.kinds.clone();
    kinds.sort();
    kinds.dedup();
    let seconds = ttl.as_secs_f64();
    let row = tx
        .query_one(
            sql::INSERT_WATCH,
            &[&new.watcher.0, &new.id, &watched.0, &kinds, &new.tool, &cursor, &seconds],
        )
        .await?;
    let begun = Watch { id: new.id, watched, kinds, tool: new.tool.clone(), expires_at: row.try_get(0)? };
    tx.commit(Writes::default()).await?;
    Ok(Ok(begun))
}

fn watch(id: Uuid, row: &Row) -> Result<Watch, StoreError> {
    Ok(Watch {
        id,
        watched: SessionId(row.try_get("watched")?),
        kinds: row.try_get("kinds")?,
        tool: row.try_get("tool")?,
        expires_at: row.try_get("expires_at")?,
    })
}

/// Stops a watch. Returns whether there was one. What it has passed on stays in the mailbox.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn stop(store: &Store, owner: &str, watcher: SessionId, id: Uuid) -> Result<bool, StoreError> {
    let gone = sqlx::query!(
        "DELETE FROM watches w USING sessions s
         WHERE w.watcher = $1 AND w.id = $2 AND s.id = w.watcher AND s.owner = $3",
        watcher.0,
        id,
        owner
    )
    .execute(store.read())
    .await?;
    Ok(gone.rows_affected() > 0)
}

/// The watches of a session that go on, the oldest first.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn list(store: &Store, owner: &str, watcher: SessionId) -> Result<Vec<Watch>, StoreError> {
    let rows = sqlx::query!(
        "SELECT w.id, w.watched, w.kinds, w.tool, w.expires_at
         FROM watches w JOIN sessions s ON s.id = w.watcher JOIN sessions o ON o.id = w.watched
         WHERE w.watcher = $1 AND s.owner = $2 AND s.deleted_at IS NULL AND o.deleted_at IS NULL
           AND w.expires_at > now()
         ORDER BY w.created_at, w.id",
        watcher.0,
        owner
    )
    .fetch_all(store.read())
    .await?;
    let watch = rows.into_iter().map(|row| Watch {
        id: row.id,
        watched: SessionId(row.watched),
        kinds: row.kinds,
        tool: row.tool,
        expires_at: row.expires_at,
    });
    Ok(watch.collect())
}
