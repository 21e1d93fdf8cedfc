//! Answers that wait until they are released.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::script::Rule;

/// The names that a script holds answers by, and who waits for them.
#[derive(Debug)]
pub(super) struct Holds {
    names: BTreeSet<String>,
    released: watch::Sender<BTreeSet<String>>,
    /// The names by the numbers of the requests that wait.
    waiting: Mutex<BTreeMap<u64, String>>,
}

impl Holds {
    pub(super) fn new(rules: &[Rule]) -> Self {
        let names = rules.iter().filter_map(|rule| rule.reply.hold.clone()).collect();
        Self { names, released: watch::Sender::default(), waiting: Mutex::default() }
    }

    /// Waits until a name is released; at once if it has been.
    pub(super) async fn wait(&self, name: &str, seq: u64) {
        let mut released = self.released.subscribe();
        let _waiting = Waiting::new(self, name, seq);
        // The sender lives as long as this, so there is nothing to go wrong.
        let _ = released.wait_for(|released| released.contains(name)).await;
    }

    /// Lets what waits for a name go, now and from now on; false if the script has no such name.
    pub(super) fn release(&self, name: &str) -> bool {
        let known = self.names.contains(name);
        if known {
            self.released.send_modify(|released| {
                released.insert(name.to_owned());
            });
        }
        known
    }

    /// What waits, oldest first.
    pub(super) fn to_json(&self) -> Value {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.iter().map(|(seq, name)| json!({ "name": name, "seq": seq })).collect()
    }
}

/// Somebody who waits, until this is dropped: a client may go away meanwhile.
struct Waiting<'a> {
    holds: &'a Holds,
    seq: u64,
}

impl<'a> Waiting<'a> {
    fn new(holds: &'a Holds, name: &str, seq: u64) -> Self {
        let mut waiting = holds.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.insert(seq, name.to_owned());
        drop(waiting);
        Self { holds, seq }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.holds.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.seq);
    }
}
