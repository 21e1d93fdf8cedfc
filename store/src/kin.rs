//! Sessions of one owner as relatives: what one is to another, and finding one by what a model knows of it.

pub use holdfast_engine::builtin::Address;
use holdfast_engine::{
    ids::SessionId,
    scope::{Relation, Scope},
};
use uuid::Uuid;

use crate::{Store, errors::StoreError, sessions, sql};

/// How many levels a lineage has at most. What is further up or down counts as no relative.
pub const LEVELS: i32 = 64;

/// How many sessions of a tree are looked at for one that is named by the end of its id, nearest to the root first.
pub const LOOKED_AT: i64 = 10_000;

/// Why no session was found.
#[derive(Debug, thiserror::Error)]
pub enum KinError {
    /// There is no such session, or it is another owner's, or deleted.
    #[error("there is no such session")]
    Unknown,
    /// It is out of reach.
    #[error("the session is outside the scope {scope}", scope = .0.word())]
    NotPermitted(Scope),
    /// Several sessions in reach have ids that end so.
    #[error("several sessions end in {0}; name one by its whole id")]
    Ambiguous(String),
    /// What the database says.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What `to` is to `from`, both of this owner.
///
/// # Errors
/// [`StoreError::UnknownSession`] if one of them doesn't exist, is another owner's, or is deleted.
pub async fn relation(
    store: &Store,
    owner: &str,
    from: SessionId,
    to: SessionId,
) -> Result<Relation, StoreError> {
    let client = store.client().await?;
    let statement = client.prepare_cached(sql::RELATION).await?;
    let row = client.query_one(&statement, &[&from.0, &to.0, &owner, &LEVELS]).await?;
    let holds = |column: &str| Ok::<_, StoreError>(row.try_get::<_, Option<bool>>(column)? == Some(true));
    if !holds("known")? {
        return Err(StoreError::UnknownSession);
    }
    Ok(match (from == to, holds("ancestor")?, holds("descendant")?) {
        (true, ..) => Relation::Own,
        (_, true, _) => Relation::Ancestor,
        (_, _, true) => Relation::Descendant,
        _ => Relation::Peer,
    })
}

/// The session that `from` names, and what it is to it.
///
/// The end of an id is looked for among the sessions of `from`'s own tree that `scope` allows, [`LOOKED_AT`] of
/// them; sessions of other trees are named by their whole ids.
///
/// # Errors
/// [`KinError`] if there is none, more than one, or one that `scope` doesn't allow.
pub async fn find(
    store: &Store,
    owner: &str,
    from: SessionId,
    address: &Address,
    scope: Scope,
) -> Result<(SessionId, Relation), KinError> {
    let id = match address {
        Address::Session(id) => *id,
        Address::Parent => match sessions::get(store, Some(owner), from).await {
            Ok(row) => SessionId(row.parent_id.ok_or(KinError::Unknown)?),
            Err(error) => return Err(unknown(error)),
        },
        Address::Short(end) => near(store, owner, from, end, scope).await?,
    };
    let relation = relation(store, owner, from, id).await.map_err(unknown)?;
    if scope.allows(relation) { Ok((id, relation)) } else { Err(KinError::NotPermitted(scope)) }
}

fn unknown(error: StoreError) -> KinError {
    match error {
        StoreError::UnknownSession => KinError::Unknown,
        error => KinError::Store(error),
    }
}

async fn near(
    store: &Store,
    owner: &str,
    from: SessionId,
    end: &str,
    scope: Scope,
) -> Result<SessionId, KinError> {
    if end.len() != 8 || !end.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(KinError::Unknown);
    }
    let end = end.to_ascii_lowercase();
    let (whole, above) = (scope == Scope::All, scope == Scope::Subtree);
    let below = if scope == Scope::Own { 1 } else { LOOKED_AT };
    let client = store.client().await.map_err(KinError::Store)?;
    let found = async {
        let statement = client.prepare_cached(sql::FIND_NEAR).await?;
        let rows =
            client.query(&statement, &[&from.0, &owner, &LEVELS, &whole, &above, &below, &end]).await?;
        rows.iter().map(|row| Ok(row.try_get(0)?)).collect::<Result<Vec<Uuid>, StoreError>>()
    };
    match *found.await? {
        [] => Err(KinError::Unknown),
        [one] => Ok(SessionId(one)),
        _ => Err(KinError::Ambiguous(end)),
    }
}
