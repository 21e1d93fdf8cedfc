//! Texts that turns name by digest. Prompts and tool lists, which every turn of an agent names, are kept at
//! hand; messages and results are fetched for the page that shows them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use holdfast_engine::content::Digest;
use holdfast_store::{Store, StoreError, load};

/// Recently used texts, up to a number of bytes.
#[derive(Debug)]
pub(crate) struct Kept {
    limit: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    texts: HashMap<(Arc<str>, Digest), (Arc<str>, u64)>,
    bytes: usize,
    clock: u64,
}

impl Kept {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, inner: Mutex::default() }
    }

    /// Texts of an owner by their digests, from memory where they are. Missing ones are missing.
    pub(crate) async fn fetch(
        &self,
        store: &Store,
        owner: &Arc<str>,
        digests: &[Digest],
    ) -> Result<HashMap<Digest, Arc<str>>, StoreError> {
        let mut found = HashMap::with_capacity(digests.len());
        let mut missing = Vec::new();
        for digest in digests {
            match self.get(owner, *digest) {
                Some(text) => {
                    found.insert(*digest, text);
                }
                None => missing.push(*digest),
            }
        }
        for (digest, text) in load::blobs(store, owner, &missing).await? {
            self.keep(owner, digest, &text);
            found.insert(digest, text);
        }
        Ok(found)
    }

    fn get(&self, owner: &Arc<str>, digest: Digest) -> Option<Arc<str>> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.clock += 1;
        let now = inner.clock;
        let (text, used) = inner.texts.get_mut(&(Arc::clone(owner), digest))?;
        *used = now;
        Some(Arc::clone(text))
    }

    fn keep(&self, owner: &Arc<str>, digest: Digest, text: &Arc<str>) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        // One text must not push out all others.
        if text.len() > self.limit / 8 {
            return;
        }
        inner.clock += 1;
        let now = inner.clock;
        inner.bytes += text.len();
        if let Some((old, _)) = inner.texts.insert((Arc::clone(owner), digest), (Arc::clone(text), now)) {
            inner.bytes -= old.len();
        }
        while inner.bytes > self.limit {
            let oldest = inner.texts.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| key.clone());
            let Some((text, _)) = oldest.and_then(|key| inner.texts.remove(&key)) else { break };
            inner.bytes -= text.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_text_goes_first_and_owners_stay_apart() {
        let kept = Kept::new(80);
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let text: Arc<str> = "0123456789".into();
        let digest = |n: u8| Digest([n; 32]);
        for n in 0..8 {
            kept.keep(&a, digest(n), &text);
        }
        assert!(kept.get(&a, digest(0)).is_some() && kept.get(&b, digest(0)).is_none());
        kept.keep(&b, digest(9), &text);
        assert!(kept.get(&a, digest(1)).is_none() && kept.get(&a, digest(0)).is_some());
        kept.keep(&a, digest(10), &"x".repeat(11).into());
        assert!(kept.get(&a, digest(10)).is_none(), "too large to keep");
    }
}
