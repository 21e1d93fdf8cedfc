//! Outages of the database, as this process meets them: said once when one begins and once when it is over,
//! however many attempts fail in between. Whoever makes an attempt says at most at debug level that it failed.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// An outage is over when something has worked and nothing has failed for so long. Whoever tries again does so
/// more often.
const QUIET: Duration = Duration::from_secs(10);

/// Why a database can't serve, in a stable word.
pub(crate) fn cause(code: Option<&str>) -> &'static str {
    match code {
        Some("53100") => "disk_full",
        Some("53200") => "out_of_memory",
        Some("53300" | "53000") => "too_many_connections",
        Some("57014" | "25P03" | "57P05") => "too_slow",
        Some("57P01" | "57P02") => "shutting_down",
        Some("57P03") => "starting",
        Some("25006") => "read_only",
        Some("58000" | "58030" | "XX000") => "server_io",
        _ => "unreachable",
    }
}

/// The outages of this process, by their cause.
#[derive(Default)]
struct Outages(BTreeMap<&'static str, Outage>);

struct Outage {
    since: Instant,
    last: Instant,
    attempts: u64,
}

/// What is over.
#[derive(Debug, PartialEq, Eq)]
struct Over {
    cause: &'static str,
    lasted: Duration,
    attempts: u64,
}

impl Outages {
    /// Takes down a failed attempt. Returns whether an outage begins.
    fn failed(&mut self, cause: &'static str, now: Instant) -> bool {
        let mut begins = false;
        let outage = self.0.entry(cause).or_insert_with(|| {
            begins = true;
            Outage { since: now, last: now, attempts: 0 }
        });
        outage.last = now;
        outage.attempts += 1;
        begins
    }

    /// Something worked. Returns what is over by that.
    fn worked(&mut self, now: Instant) -> Vec<Over> {
        let mut over = Vec::new();
        self.0.retain(|cause, outage| {
            let going_on = now.saturating_duration_since(outage.last) < QUIET;
            if !going_on {
                let lasted = outage.last.saturating_duration_since(outage.since);
                over.push(Over { cause, lasted, attempts: outage.attempts });
            }
            going_on
        });
        over
    }
}

static OUTAGES: Mutex<Outages> = Mutex::new(Outages(BTreeMap::new()));
/// Whether there are any: what works needs no lock then.
static ANY: AtomicBool = AtomicBool::new(false);

/// An attempt failed because the database can't serve.
pub(crate) fn failed(cause: &'static str, error: &str) {
    let begins = OUTAGES.lock().unwrap_or_else(PoisonError::into_inner).failed(cause, Instant::now());
    ANY.store(true, Ordering::Relaxed);
    if begins {
        tracing::warn!(
            kind = "database.unavailable",
            cause,
            error,
            "what needs the database waits or is answered with 503"
        );
    }
}

/// The database has served.
pub(crate) fn worked() {
    if !ANY.load(Ordering::Relaxed) {
        return;
    }
    let over = {
        let mut outages = OUTAGES.lock().unwrap_or_else(PoisonError::into_inner);
        let over = outages.worked(Instant::now());
        ANY.store(!outages.0.is_empty(), Ordering::Relaxed);
        over
    };
    for Over { cause, lasted, attempts } in over {
        tracing::info!(kind = "database.available", cause, seconds = lasted.as_secs(), attempts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_said_once_and_ends_when_it_is_quiet() {
        let (start, mut outages) = (Instant::now(), Outages::default());
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        assert!(outages.failed("disk_full", at(0)));
        assert!(!outages.failed("disk_full", at(5)));
        assert!(outages.failed("unreachable", at(6)), "another cause is another outage");
        assert_eq!(outages.worked(at(7)), [], "something works in between");
        assert!(!outages.failed("disk_full", at(12)));
        let over = |cause, seconds, attempts| Over { cause, lasted: Duration::from_secs(seconds), attempts };
        assert_eq!(outages.worked(at(17)), [over("unreachable", 0, 1)]);
        assert_eq!(outages.worked(at(22)), [over("disk_full", 12, 3)]);
        assert!(outages.failed("disk_full", at(23)), "the next one");
    }
}
