//! The rules of Holdfast: values in, values out.
//!
//! This crate knows what a session is, what may happen to it next and what the
//! model is shown. It does no IO, reads no clock and draws no random number:
//! time, ids and everything from outside come in as arguments, and effects are
//! returned as data for somebody else to carry out.

pub mod agent;
pub mod builtin;
pub mod conduct;
pub mod content;
pub mod decide;
pub mod ids;
pub mod mail;
pub mod model;
pub mod naming;
pub mod offer;
pub mod policy;
mod say;
pub mod scope;
pub mod session;
mod status;
pub mod tool;
pub mod transcript;
pub mod turn;
pub mod waits;
pub mod waking;
pub mod watching;
pub mod webhook;

/// Points in time: UTC, microseconds, always given by a caller.
pub type Time = chrono::DateTime<chrono::Utc>;
