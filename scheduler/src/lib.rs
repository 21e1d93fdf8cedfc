//! Keeping time: passes over the database that expire, promote and clean up.
//!
//! Every pass is idempotent, bounded, and steps around rows that others hold. Any number of
//! schedulers may run; losing all of them delays timers and clean-up and nothing else. A pass also
//! runs when its scheduler starts, since a tick that fell into a restart is lost.

mod clocks;
mod metrics;
mod webhooks;

use std::{pin::pin, str::FromStr, sync::Arc, time::Duration};

use apalis_cron::CronScheduler;
use chrono::Utc;
use cron::Schedule;
use futures::{FutureExt, StreamExt, future::BoxFuture};
use holdfast_store::{
    Store, StoreError, passes,
    retire::{self, Swept, Terms},
    settle, watches,
};
use tokio::{sync::Mutex, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use uuid::Uuid;

use crate::{clocks::Clocks, metrics::Outcome};

pub use webhooks::{AT_ONCE, MAX_SECRETS_FILE, MOST_SECRETS, Secrets, SecretsError, Webhooks};

/// Rows that one statement of a pass touches at the most.
const BATCH: i64 = 500;

/// Batches that one pass does before it waits for its next tick.
const MAX_BATCHES: usize = 200;

/// Seconds between the deletion of a session and the removal of its rows, in which streams can still
/// say that it was deleted.
const DELETED_GRACE: f64 = 60.0;

/// Looks for closed sessions that one batch takes, so that a scheduler can stop between them.
const LOOKS: u64 = 20;

/// What a scheduler is told at its start.
#[derive(Debug, Clone)]
pub struct Config {
    /// Days for which events can be replayed.
    pub keep_events_days: u64,
    /// What becomes of closed sessions; `None` keeps them.
    pub retire: Option<Terms>,
    /// Days for which archives are kept; `None` keeps them.
    pub keep_archives_days: Option<i32>,
    /// Which webhooks are sent, and how they are signed; `None` sends none.
    pub webhooks: Option<Webhooks>,
}

impl Default for Config {
    fn default() -> Self {
        Self { keep_events_days: 7, retire: None, keep_archives_days: None, webhooks: None }
    }
}

/// What all passes share.
struct Office {
    store: Store,
    config: Config,
    clocks: Mutex<Clocks>,
    /// Where the next look for closed sessions begins.
    sweep: Mutex<Uuid>,
}

type Work = for<'a> fn(&'a Office) -> BoxFuture<'a, Result<u64, StoreError>>;

/// One duty: its name, when it is due, and one batch of its work.
struct Pass {
    name: &'static str,
    /// Seconds, minutes, hours, days, months, weekdays.
    when: &'static str,
    batch: Work,
}

/// All duties. A batch that did something is followed by the next one at once.
const PASSES: &[Pass] = &[
    Pass {
        name: "expire_tokens",
        when: "* * * * * *",
        batch: |office| settle::expire_overdue(&office.store, BATCH).boxed(),
    },
    Pass {
        name: "promote_timers",
        when: "* * * * * *",
        batch: |office| passes::promote_timers(&office.store, BATCH).boxed(),
    },
    Pass {
        name: "forward_watches",
        when: "* * * * * *",
        batch: |office| watches::forward(&office.store, BATCH).boxed(),
    },
    Pass { name: "watch_clock", when: "* * * * * *", batch: |office| watch_clock(office).boxed() },
    Pass {
        name: "mend_clock",
        when: "*/10 * * * * *",
        batch: |office| passes::mend_clock(&office.store, BATCH).boxed(),
    },
    Pass {
        name: "purge_deleted",
        when: "*/10 * * * * *",
        batch: |office| retire::purge_deleted(&office.store, DELETED_GRACE, 50).boxed(),
    },
    Pass {
        name: "forget_keys",
        when: "0 * * * * *",
        batch: |office| passes::forget_keys(&office.store, BATCH).boxed(),
    },
    Pass {
        name: "forget_workers",
        when: "0 * * * * *",
        batch: |office| passes::forget_workers(&office.store).boxed(),
    },
    Pass {
        name: "forget_results",
        when: "10 * * * * *",
        batch: |office| passes::forget_results(&office.store, BATCH).boxed(),
    },
    Pass {
        name: "forget_rates",
        when: "20 0 * * * *",
        batch: |office| passes::forget_rates(&office.store, BATCH).boxed(),
    },
    Pass {
        name: "turn_event_partitions",
        when: "30 0 * * * *",
        batch: |office| turn_partitions(office).boxed(),
    },
    Pass { name: "retire_closed", when: "0 */5 * * * *", batch: |office| retire_closed(office).boxed() },
    Pass { name: "queue_webhooks", when: "* * * * * *", batch: |office| queue_webhooks(office).boxed() },
    Pass {
        name: "forget_webhooks",
        when: "40 * * * * *",
        batch: |office| holdfast_store::webhooks::forget(&office.store, BATCH).boxed(),
    },
    Pass { name: "forget_archives", when: "20 0 * * * *", batch: |office| forget_archives(office).boxed() },
];

async fn turn_partitions(office: &Office) -> Result<u64, StoreError> {
    let keep = Some(office.config.keep_events_days);
    let changed = passes::turn_event_partitions(&office.store, Utc::now(), keep).await?;
    Ok(u64::try_from(changed.len()).unwrap_or(u64::MAX))
}

/// Goes on with the sweep over all sessions; at its end the next tick begins a new one. Returns how many looks
/// it took, and 0 at the end.
async fn retire_closed(office: &Office) -> Result<u64, StoreError> {
    let Some(terms) = office.config.retire else { return Ok(0) };
    let mut place = office.sweep.lock().await;
    for _ in 0..LOOKS {
        let Swept { sessions, whole } = retire::retire(&office.store, terms, &mut place).await?;
        if sessions > 0 {
            metrics::retired(sessions);
            tracing::info!(kind = "sessions.retired", sessions);
        }
        if whole {
            return Ok(0);
        }
    }
    Ok(LOOKS)
}

/// Says that a clock has jumped, and at once mends what one that was set back has left.
async fn watch_clock(office: &Office) -> Result<u64, StoreError> {
    let asked = Instant::now();
    let database = passes::clock(&office.store).await?;
    let jumps = office.clocks.lock().await.tick(asked, Instant::now(), Utc::now(), database);
    for (whose, by) in &jumps {
        tracing::warn!(
            kind = "clock.jumped",
            whose,
            seconds = by.num_seconds(),
            "leases and due times are moved where it was set back"
        );
    }
    if jumps.is_empty() { Ok(0) } else { passes::mend_clock(&office.store, BATCH).await }
}

async fn queue_webhooks(office: &Office) -> Result<u64, StoreError> {
    match &office.config.webhooks {
        Some(config) => webhooks::queue(&office.store, config).await,
        None => Ok(0),
    }
}

async fn forget_archives(office: &Office) -> Result<u64, StoreError> {
    match office.config.keep_archives_days {
        Some(days) => retire::forget_archives(&office.store, days, BATCH).await,
        None => Ok(0),
    }
}

/// Runs all passes until `shutdown`. A pass under way is let finish its batch.
pub async fn run(store: Store, config: Config, shutdown: CancellationToken) {
    metrics::begin();
    let tasks = TaskTracker::new();
    if let Some(config) = config.webhooks.clone() {
        tasks.spawn(webhooks::run(store.clone(), config, shutdown.clone()));
    }
    let office = Arc::new(Office { store, config, sweep: Mutex::default(), clocks: Mutex::default() });
    for pass in PASSES {
        tasks.spawn(keep(pass, Arc::clone(&office), shutdown.clone()));
    }
    tasks.close();
    tasks.wait().await;
}

async fn keep(pass: &'static Pass, office: Arc<Office>, shutdown: CancellationToken) {
    let schedule = match Schedule::from_str(pass.when) {
        Ok(schedule) => schedule,
        Err(error) => {
            tracing::error!(pass = pass.name, %error, "the pass has no valid schedule and never runs");
            return;
        }
    };
    let mut ticks = pin!(CronScheduler::new(schedule).into_stream());
    loop {
        work_off(pass, &office, &shutdown).await;
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

async fn work_off(pass: &Pass, office: &Office, shutdown: &CancellationToken) {
    let began = Instant::now();
    let (mut done, mut outcome) = (0, Outcome::Unfinished);
    for _ in 0..MAX_BATCHES {
        if shutdown.is_cancelled() {
            break;
        }
        match (pass.batch)(office).await {
            Ok(0) => {
                outcome = Outcome::Done;
                break;
            }
            Ok(count) => {
                done += count;
                metrics::did(pass.name, count);
            }
            Err(error) if error.is_unavailable() => {
                outcome = Outcome::Unavailable;
                break;
            }
            Err(error) => {
                outcome = Outcome::Failed;
                tracing::warn!(kind = "scheduler.pass_failed", pass = pass.name, %error, "tried again at the next tick");
                break;
            }
        }
    }
    metrics::passed(pass.name, outcome, began.elapsed());
    if done > 0 && matches!(outcome, Outcome::Done | Outcome::Unfinished) {
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
