//! Keeping time: passes over the database that expire, promote and clean up.
//!
//! Every pass is idempotent, bounded, and steps around rows that others hold. Any number of
//! schedulers may run; losing all of them delays timers and clean-up and nothing else. A pass also
//! runs when its scheduler starts, since a tick that fell into a restart is lost.

use std::{pin::pin, str::FromStr, time::Duration};

use apalis_cron::CronScheduler;
use chrono::Utc;
use cron::Schedule;
use futures::{FutureExt, StreamExt, future::BoxFuture};
use holdfast_store::{Store, StoreError, passes};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Rows that one statement of a pass touches at the most.
const BATCH: i64 = 500;

/// Batches that one pass does before it waits for its next tick.
const MAX_BATCHES: usize = 200;

/// Seconds between the deletion of a session and the removal of its rows, in which streams can still
/// say that it was deleted.
const DELETED_GRACE: f64 = 60.0;

/// What a scheduler is told at its start.
#[derive(Debug, Clone)]
pub struct Config {
    /// Days for which events can be replayed.
    pub keep_events_days: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self { keep_events_days: 7 }
    }
}

type Work = for<'a> fn(&'a Store, &'a Config) -> BoxFuture<'a, Result<u64, StoreError>>;

/// One duty: its name, when it is due, and one batch of its work.
struct Pass {
    name: &'static str,
    /// Seconds, minutes, hours, days, months, weekdays.
    when: &'static str,
    batch: Work,
}

/// All duties. A batch that comes back full is followed by the next one at once.
const PASSES: &[Pass] = &[
    Pass {
        name: "expire_tokens",
        when: "* * * * * *",
        batch: |store, _| passes::expire_tokens(store, BATCH).boxed(),
    },
    Pass {
        name: "promote_timers",
        when: "* * * * * *",
        batch: |store, _| passes::promote_timers(store, BATCH).boxed(),
    },
    Pass {
        name: "purge_deleted",
        when: "*/10 * * * * *",
        batch: |store, _| passes::purge_deleted(store, DELETED_GRACE, 50).boxed(),
    },
    Pass {
        name: "forget_keys",
        when: "0 * * * * *",
        batch: |store, _| passes::forget_keys(store, BATCH).boxed(),
    },
    Pass {
        name: "forget_workers",
        when: "0 * * * * *",
        batch: |store, _| passes::forget_workers(store).boxed(),
    },
    Pass { name: "turn_event_partitions", when: "30 0 * * * *", batch: turn_partitions },
];

fn turn_partitions<'a>(store: &'a Store, config: &'a Config) -> BoxFuture<'a, Result<u64, StoreError>> {
    async move {
        let changed = passes::turn_event_partitions(store, Utc::now(), config.keep_events_days).await?;
        Ok(u64::try_from(changed.len()).unwrap_or(u64::MAX))
    }
    .boxed()
}

/// Runs all passes until `shutdown`. A pass under way is let finish its batch.
pub async fn run(store: Store, config: Config, shutdown: CancellationToken) {
    let tasks = TaskTracker::new();
    for pass in PASSES {
        tasks.spawn(keep(pass, store.clone(), config.clone(), shutdown.clone()));
    }
    tasks.close();
    tasks.wait().await;
}

async fn keep(pass: &'static Pass, store: Store, config: Config, shutdown: CancellationToken) {
    let schedule = match Schedule::from_str(pass.when) {
        Ok(schedule) => schedule,
        Err(error) => {
            tracing::error!(pass = pass.name, %error, "the pass has no valid schedule and never runs");
            return;
        }
    };
    let mut ticks = pin!(CronScheduler::new(schedule).into_stream());
    loop {
        work_off(pass, &store, &config, &shutdown).await;
        tokio::select! {
            () = shutdown.cancelled() => return,
            tick = ticks.next() => match tick {
                Some(Ok(_)) => {}
                // A clock that jumps may end a stream of ticks; the duty goes on.
                Some(Err(_)) | None => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        }
    }
}

async fn work_off(pass: &Pass, store: &Store, config: &Config, shutdown: &CancellationToken) {
    let mut done = 0;
    for _ in 0..MAX_BATCHES {
        if shutdown.is_cancelled() {
            return;
        }
        match (pass.batch)(store, config).await {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.is_unavailable() => return,
            Err(error) => {
                tracing::warn!(kind = "scheduler.pass_failed", pass = pass.name, %error, "tried again at the next tick");
                return;
            }
        }
    }
    if done > 0 {
        tracing::info!(kind = "scheduler.pass", pass = pass.name, done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_has_a_schedule_and_a_name_of_its_own() {
        let mut names = std::collections::HashSet::new();
        for pass in PASSES {
            assert!(Schedule::from_str(pass.when).is_ok(), "{}", pass.name);
            assert!(names.insert(pass.name), "{} stands twice", pass.name);
        }
    }
}
