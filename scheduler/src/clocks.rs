//! Watching clocks: those of the database and of this process, by one that nobody sets.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use tokio::time::Instant;

/// What a clock may gain or lose between two looks before it counts as a jump.
const TOLERANCE: TimeDelta = TimeDelta::seconds(5);

/// A look at the database's clock that took longer says too little.
const SLOW: Duration = Duration::from_secs(2);

/// What the clocks said at the last look.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    database: Option<(Instant, DateTime<Utc>)>,
    process: Option<(Instant, DateTime<Utc>)>,
}

impl Clocks {
    /// Takes a look that was `asked` for and `answered` by the steady clock. Returns whose clocks have jumped since
    /// the last one, and by how much.
    pub(crate) fn tick(
        &mut self,
        asked: Instant,
        answered: Instant,
        process: DateTime<Utc>,
        database: DateTime<Utc>,
    ) -> Vec<(&'static str, TimeDelta)> {
        let mut jumps = Vec::new();
        jumps.extend(jump(&mut self.process, answered, process).map(|by| ("this process", by)));
        if answered - asked > SLOW {
            self.database = None;
            return jumps;
        }
        jumps.extend(jump(&mut self.database, asked, database).map(|by| ("the database", by)));
        jumps
    }
}

fn jump(last: &mut Option<(Instant, DateTime<Utc>)>, at: Instant, says: DateTime<Utc>) -> Option<TimeDelta> {
    let (before, said) = last.replace((at, says))?;
    let passed = TimeDelta::from_std(at.saturating_duration_since(before)).ok()?;
    Some(says - said - passed).filter(|by| by.abs() > TOLERANCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_jumps_are_told_and_each_once() {
        let (start, mut clocks) = (Instant::now(), Clocks::default());
        let date = DateTime::<Utc>::UNIX_EPOCH;
        let mut look = |second: u64, slow: u64, process: i64, database: i64| {
            let asked = start + Duration::from_secs(second);
            let at = |said: i64| date + TimeDelta::seconds(said);
            clocks.tick(asked, asked + Duration::from_secs(slow), at(process), at(database))
        };
        assert_eq!(look(0, 0, 0, 7), []);
        assert_eq!(look(10, 0, 11, 20), [], "clocks that drift");
        assert_eq!(look(11, 0, 12, 3621), [("the database", TimeDelta::seconds(3600))]);
        assert_eq!(look(12, 0, 13, 3622), []);
        assert_eq!(look(13, 0, -3586, 3623), [("this process", TimeDelta::seconds(-3600))]);
        assert_eq!(look(14, 20, -3565, 9), [], "nobody knows when the database looked");
        assert_eq!(look(35, 0, -3564, 50), []);
        assert_eq!(look(36, 0, -3563, 30), [("the database", TimeDelta::seconds(-21))]);
    }
}
