//! Ending or holding the process at a named point of the store, for crash tests.

use holdfast_store::Store;

use crate::failure::Failure;

const CRASH: &str = "HOLDFAST_CRASH_AT";
const PAUSE: &str = "HOLDFAST_PAUSE_AT";
const PLANT: &str = "HOLDFAST_PLANT";

/// The store with the faults that the environment asks for.
///
/// # Errors
/// [`Failure::Config`] for a point that doesn't exist, and in a build without faults for any request.
pub(super) fn inject(store: Store) -> Result<Store, Failure> {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    if let Some(name) = variable(PLANT) {
        plant::check(&name)?;
    }
    arm(store, variable(CRASH), variable(PAUSE))
}

#[cfg(not(feature = "fault-injection"))]
fn arm(store: Store, crash: Option<String>, pause: Option<String>) -> Result<Store, Failure> {
    if crash.is_some() || pause.is_some() {
        return Err(Failure::Config(format!(
            "{CRASH} and {PAUSE} need a build with the feature fault-injection"
        )));
    }
    Ok(store)
}

#[cfg(feature = "fault-injection")]
fn arm(store: Store, crash: Option<String>, pause: Option<String>) -> Result<Store, Failure> {
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    };

    use holdfast_store::gate::Gate;

    let crash = crash.map(|text| plan::crash(&text)).transpose()?;
    let pause = pause.map(|text| plan::pause(&text)).transpose()?;
    if crash.is_none() && pause.is_none() {
        return Ok(store);
    }
    let passed = Arc::new(AtomicU64::new(0));
    Ok(store.with_gate(Gate::new(move |point| {
        if let Some((at, nth)) = crash
            && at == point
            && passed.fetch_add(1, Ordering::SeqCst) + 1 == nth
        {
            tracing::error!(kind = "fault.crash", point);
            std::process::abort();
        }
        let held = pause.clone().filter(|(at, _)| *at == point);
        Box::pin(async move {
            let Some((_, file)) = held else { return };
            tracing::warn!(kind = "fault.pause", point);
            let mut ticks = tokio::time::interval(plan::LOOK);
            while !tokio::fs::try_exists(&file).await.unwrap_or(false) {
                ticks.tick().await;
            }
        })
    })))
}

/// Mistakes on purpose. The store makes them; a name that it wouldn't know is refused here.
mod plant {
    use holdfast_store::plant::{Mistake, PLANTED};

    use super::PLANT;
    use crate::failure::Failure;

    pub(super) fn check(name: &str) -> Result<(), Failure> {
        if !PLANTED {
            return Err(Failure::Config(format!("{PLANT} needs a build with the feature fault-injection")));
        }
        if Mistake::ALL.iter().any(|mistake| mistake.name() == name) {
            return Ok(());
        }
        let known: Vec<&str> = Mistake::ALL.iter().map(|mistake| mistake.name()).collect();
        Err(Failure::Config(format!("{PLANT}: unknown mistake {name:?}; known are {}", known.join(", "))))
    }
}

#[cfg(any(test, feature = "fault-injection"))]
mod plan {
    use std::path::PathBuf;

    use holdfast_store::gate::POINTS;

    use super::{CRASH, PAUSE};
    use crate::failure::Failure;

    /// How often a held process looks for its file.
    #[cfg(feature = "fault-injection")]
    pub(super) const LOOK: std::time::Duration = std::time::Duration::from_millis(20);

    /// `point[:n]`.
    pub(super) fn crash(text: &str) -> Result<(&'static str, u64), Failure> {
        let (name, nth) = text.split_once(':').unwrap_or((text, "1"));
        let nth = nth.parse().ok().filter(|nth| *nth > 0);
        let nth = nth.ok_or_else(|| Failure::Config(format!("{CRASH}: expected point[:n], n from 1")))?;
        Ok((point(CRASH, name)?, nth))
    }

    /// `point:FILE`.
    pub(super) fn pause(text: &str) -> Result<(&'static str, PathBuf), Failure> {
        let parts = text.split_once(':').filter(|(_, file)| !file.is_empty());
        let (name, file) = parts.ok_or_else(|| Failure::Config(format!("{PAUSE}: expected point:FILE")))?;
        Ok((point(PAUSE, name)?, file.into()))
    }

    fn point(variable: &str, name: &str) -> Result<&'static str, Failure> {
        let known = POINTS.iter().copied().find(|point| *point == name);
        known.ok_or_else(|| {
            Failure::Config(format!("{variable}: unknown point {name:?}; known are {}", POINTS.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_checked_against_the_stores_list() {
        assert_eq!(plant::check("nonsense").expect_err("refused").code(), 3);
        let known = plant::check("no-epoch-check");
        assert_eq!(known.is_ok(), holdfast_store::plant::PLANTED);
    }

    #[test]
    fn points_are_checked_against_the_stores_list() {
        assert_eq!(plan::crash("commit.begun"), Ok(("commit.begun", 1)));
        assert_eq!(plan::crash("commit.begun:3"), Ok(("commit.begun", 3)));
        assert_eq!(plan::pause("tool.done:/tmp/go:on"), Ok(("tool.done", "/tmp/go:on".into())));
        for text in ["commit.begun:0", "commit.begun:x", "nowhere"] {
            assert_eq!(plan::crash(text).expect_err(text).code(), 3);
        }
        for text in ["tool.done", "tool.done:", "nowhere:/f"] {
            assert_eq!(plan::pause(text).expect_err(text).code(), 3);
        }
    }
}
