//! What the tests of the whole share: a Postgres with a migrated template database, a store over a
//! copy of it, a worker's hand without a model, and a proxy that breaks connections at chosen moments.

pub mod cluster;
pub mod gates;
pub mod proxy;
pub mod step;
pub mod store;
