//! What the tests of the whole share: a Postgres with a migrated template database, a store over a
//! copy of it, a worker's hand without a model, a proxy that breaks connections at chosen moments, and
//! whole nodes as processes with clients that try again, and what `holdfast status` says of it all.

pub mod chaos;
pub mod cluster;
pub mod faketime;
pub mod gates;
pub mod hooked;
pub mod load;
pub mod memory;
pub mod otlp;
pub mod planted;
pub mod proxy;
pub mod receiver;
pub mod scrape;
pub mod server;
pub mod sse;
pub mod status;
pub mod step;
pub mod store;
pub mod storm;
pub mod talk;
pub mod wire;
pub mod world;
