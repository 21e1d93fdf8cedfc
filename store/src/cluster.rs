//! What all nodes together are doing, as the database has it: for those who watch.

use crate::{Store, errors::StoreError};

/// Why due runs wait, by what their owners do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The owner has no run under way.
    Idle,
    /// The owner has others under way.
    Busy,
    /// The owner may start no more now, by its own limits.
    Throttled,
}

impl Class {
    /// All of them, in the order of their declaration.
    pub const ALL: [Self; 3] = [Self::Idle, Self::Busy, Self::Throttled];

    /// Its name as a label.
    pub fn word(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Busy => "busy",
            Self::Throttled => "throttled",
        }
    }
}

/// Runs that are due and wait for a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Due {
    /// How many.
    pub runs: i64,
    /// For how many microseconds the oldest has been due.
    pub oldest_micros: i64,
}

/// The due runs of each class, in the order of [`Class::ALL`].
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn due(store: &Store) -> Result<[Due; Class::ALL.len()], StoreError> {
    let rows = sqlx::query!(
        r#"WITH due AS (
               SELECT owner, count(*) AS runs, min(available_at) AS oldest
               FROM runs WHERE state = 'queued' AND available_at <= now() GROUP BY owner
           ), classed AS (
               SELECT due.runs, due.oldest, CASE
                   WHEN EXISTS (
                       SELECT 1 FROM owner_limits l WHERE l.owner = due.owner AND (
                           l.runs_per_minute = 0
                           OR l.bucket + extract(epoch FROM greatest(now() - l.filled_at, interval '0'))::float8 * l.runs_per_minute / 60 < 1
                           OR l.max_running <= (SELECT count(*) FROM runs h WHERE h.owner = l.owner AND h.state = 'claimed')))
                       THEN 'throttled'
                   WHEN EXISTS (SELECT 1 FROM runs h WHERE h.owner = due.owner AND h.state = 'claimed') THEN 'busy'
                   ELSE 'idle' END AS class
               FROM due
           )
           SELECT class AS "class!", sum(runs)::bigint AS "runs!",
                  (extract(epoch FROM now() - min(oldest)) * 1000000)::bigint AS "oldest_micros!"
           FROM classed GROUP BY class"#
    )
    .fetch_all(store.read())
    .await?;
    let mut classes = [Due::default(); Class::ALL.len()];
    for row in rows {
        if let Some(class) = Class::ALL.into_iter().find(|class| class.word() == row.class) {
            classes[class as usize] = Due { runs: row.runs, oldest_micros: row.oldest_micros };
        }
    }
    Ok(classes)
}

/// Those who do the work, and what is open outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Registered workers that were heard of within a minute.
    pub workers: i64,
    /// Their slots.
    pub slots: i64,
    /// How many of these they said they hold.
    pub held: i64,
    /// Microseconds since the oldest open deferred call was made; 0 if there is none.
    pub oldest_continuation_micros: i64,
    /// Microseconds since the earliest deadline of an open deferred call passed; 0 if none has.
    pub overdue_micros: i64,
}

/// Workers and deferred calls.
///
/// # Errors
/// [`StoreError`] as the database has it.
pub async fn standing(store: &Store) -> Result<Standing, StoreError> {
    let row = sqlx::query_as!(
        Standing,
        r#"SELECT w.workers AS "workers!", w.slots AS "slots!", w.held AS "held!",
                  coalesce((extract(epoch FROM now() - c.oldest) * 1000000)::bigint, 0) AS "oldest_continuation_micros!",
                  coalesce((extract(epoch FROM greatest(now() - c.due, interval '0')) * 1000000)::bigint, 0) AS "overdue_micros!"
           FROM (SELECT count(*) AS workers, coalesce(sum(slots), 0)::bigint AS slots, coalesce(sum(held), 0)::bigint AS held
                 FROM workers WHERE seen_at > now() - interval '1 minute') w,
                (SELECT (SELECT min(created_at) FROM continuations WHERE state = 'open') AS oldest,
                        (SELECT min(expires_at) FROM continuations WHERE state = 'open' AND expires_at IS NOT NULL) AS due) c"#
    )
    .fetch_one(store.read())
    .await?;
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_stand_in_the_order_that_lists_them() {
        for (place, class) in Class::ALL.into_iter().enumerate() {
            assert_eq!(class as usize, place, "{class:?}");
        }
    }
}
