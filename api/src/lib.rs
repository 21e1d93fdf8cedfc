//! The HTTP surface of Holdfast.
//!
//! A route extracts who asks and what for, calls one function of the store, and renders what it finds.
//! Nodes know nothing of each other: commands append to the database, and whoever waits or follows events
//! here is woken by hints and by a scan a second, so any node serves any session.

mod across;
mod agents;
mod auth;
mod blobs;
mod config;
mod create;
mod describe;
mod edge;
mod error;
mod events;
mod extract;
mod health;
mod hub;
mod limits;
mod mail;
mod metrics;
mod origin;
mod peer;
mod pending;
mod render;
mod routes;
mod runs;
mod serve;
mod sessions;
mod sse;
mod state;
mod tenants;
mod turns;
mod view;
mod wait;

pub use auth::TokensError;
pub use config::{Config, ConfigError};
pub use limits::MAX_BODY;
pub use peer::Peer;
pub use routes::{openapi, router};
pub use serve::{Bound, ServeError, serve};
pub use state::{Api, Shared};
