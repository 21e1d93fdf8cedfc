//! The only SQL of Holdfast.
//!
//! Clients' commands come in through [`accept`] and [`settle`]; workers take runs with [`claim`],
//! read sessions with [`load`] and store steps with [`commit`], in [`group`]s; clients read through [`sessions`],
//! [`history`] and [`feed`]; sessions write to each other by [`correspond`], follow each other by [`watches`] and read
//! each other by [`introspect`]; schedulers run the [`passes`]. Locks are taken in one order everywhere:
//! sessions by id, then runs by id, then continuations and blobs by key.

pub mod accept;
pub mod agents;
pub mod claim;
pub mod cluster;
pub mod commit;
pub mod connect;
pub mod correspond;
pub mod counters;
pub mod create;
pub mod delete;
pub mod embedded;
pub mod errors;
pub mod feed;
pub mod gate;
pub mod group;
pub mod history;
pub mod idempotency;
pub mod install;
pub mod introspect;
pub mod kin;
pub mod letters;
pub mod listen;
pub mod load;
pub mod loader;
pub mod migrate;
pub mod notify;
mod outage;
pub mod passes;
pub mod plant;
pub mod post;
pub mod progress;
pub mod quota;
pub mod retire;
mod retry;
mod room;
pub mod sessions;
pub mod settle;
pub mod shown;
pub mod snapshot;
mod spawn;
pub mod sql;
pub mod status;
pub mod tool_rates;
pub mod tool_results;
mod transaction;
pub mod waking;
pub mod watches;
pub mod webhooks;
pub mod workers;

pub use errors::StoreError;

use holdfast_engine::ids::SessionId;

use crate::{
    connect::Db,
    create::Nursery,
    gate::Gate,
    notify::{Channel, Notifier},
    post::Postroom,
    quota::Backlog,
};

/// The store of one process: its connections, and the notifier that tells others what changed.
#[derive(Debug, Clone)]
pub struct Store {
    db: Db,
    notifier: Option<Notifier>,
    gate: Option<Gate>,
    backlog: Backlog,
    postroom: Postroom,
    nursery: Nursery,
}

impl Store {
    /// A store over connections. Without a notifier nothing is announced, and everybody else learns
    /// of changes by their scans.
    pub fn new(db: Db, notifier: Option<Notifier>) -> Self {
        let (postroom, nursery) = (Postroom::default(), Nursery::default());
        Self { db, notifier, gate: None, backlog: Backlog::default(), postroom, nursery }
    }

    /// The same store with a gate at its named points.
    #[must_use]
    pub fn with_gate(mut self, gate: Gate) -> Self {
        self.gate = Some(gate);
        self
    }

    /// The same store as its rooms have it, which must not keep themselves alive.
    fn without_rooms(&self) -> Self {
        Self { postroom: Postroom::default(), nursery: Nursery::default(), ..self.clone() }
    }

    /// The connections.
    pub fn db(&self) -> &Db {
        &self.db
    }

    /// The notifier.
    pub fn notifier(&self) -> Option<&Notifier> {
        self.notifier.as_ref()
    }

    /// Passes a named point; see [`gate::POINTS`].
    pub async fn at(&self, point: &'static str) {
        if let Some(gate) = &self.gate {
            gate.pass(point).await;
        }
    }

    /// Hints that a session has news for those who watch it and, with `run`, for workers. Called
    /// after the commit: a hint that is lost costs one scan's waiting.
    pub fn announce(&self, session: SessionId, run: bool) {
        let Some(notifier) = &self.notifier else { return };
        notifier.send(Channel::Events, session.to_string());
        if run {
            notifier.send(Channel::Runs, session.to_string());
        }
    }

    async fn client(&self) -> Result<deadpool_postgres::Client, StoreError> {
        Ok(self.db.client().await?)
    }

    /// A connection of the few that are kept for leases: they can't wait for commands of clients.
    async fn lease_client(&self) -> Result<deadpool_postgres::Client, StoreError> {
        Ok(self.db.lease_client().await?)
    }

    fn read(&self) -> &sqlx::PgPool {
        self.db.read()
    }
}
