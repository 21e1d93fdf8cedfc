//! The HTTP surface on a real Postgres, without a worker: where a run has to go on, the test takes a
//! worker's place and drives it through the store's own functions.

mod auth;
mod contract;
mod events;
mod feed;
mod hand;
mod idempotency;
mod mail;
mod operation;
mod reading;
mod refusals;
mod sessions;
mod support;
mod tenants;
mod waiting;
