//! A client of several API nodes, any of which may be gone: each attempt goes to another one.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use serde_json::Value;

use super::dice::Dice;
use crate::world::{client, until_answered};

/// Where API nodes listen now.
pub(super) type Addresses = Arc<Mutex<Vec<String>>>;

/// A client behind a load balancer.
pub(super) struct Client {
    http: reqwest::Client,
    addresses: Addresses,
    drawn: AtomicU64,
    retries: AtomicU64,
}

impl Client {
    /// A client of these nodes.
    pub(super) fn new(addresses: Addresses, seed: u64) -> Self {
        Self { http: client(), addresses, drawn: AtomicU64::new(seed), retries: AtomicU64::new(0) }
    }

    /// How many attempts weren't answered, or with 503.
    pub(super) fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    fn address(&self) -> String {
        let mut dice = Dice::new(self.drawn.fetch_add(1, Ordering::Relaxed));
        self.addresses.lock().ok().and_then(|all| dice.pick(&all).cloned()).unwrap_or_default()
    }

    /// Sends a request to one node after another until it is answered with something else than 503; a
    /// POST carries one idempotency key through all attempts.
    ///
    /// # Errors
    /// If that takes longer than a test is patient; an answer is returned whatever its status.
    pub(super) async fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value)> {
        let url = || format!("{}{path}", self.address());
        let failed = || {
            self.retries.fetch_add(1, Ordering::Relaxed);
        };
        until_answered(&self.http, method, body, Duration::from_millis(50), url, failed).await
    }
}
