-- The owners with the most queued runs, and those that have waited longest, throttled ones apart: of the first $2
-- queued runs in the order of the index of due runs.
WITH mine AS (
    SELECT q.owner, count(*) AS queued, count(*) FILTER (WHERE q.available_at <= now()) AS due,
           min(q.available_at) AS since
    FROM (SELECT owner, available_at FROM runs WHERE state = 'queued' AND ($1::text IS NULL OR owner = $1) ORDER BY owner LIMIT $2) q
    GROUP BY q.owner
), ranked AS (
    SELECT m.owner, m.queued, m.due, m.since, l.max_running, l.runs_per_minute, l.max_queued,
           CASE WHEN l.runs_per_minute IS NOT NULL
                THEN least(l.runs_per_minute, l.bucket + extract(epoch FROM greatest(now() - l.filled_at, interval '0'))::float8 * l.runs_per_minute / 60)
           END AS bucket,
           sum(m.queued) OVER () AS total, count(*) OVER () AS owners,
           row_number() OVER (ORDER BY m.queued DESC, m.owner) AS by_size,
           row_number() OVER (PARTITION BY l.max_running IS NOT NULL OR l.runs_per_minute IS NOT NULL ORDER BY m.since, m.owner) AS by_age
    FROM mine m LEFT JOIN owner_limits l ON l.owner = m.owner
)
SELECT r.owner AS "owner!", r.queued AS "queued!", r.due AS "due!",
       CASE WHEN r.since <= now() THEN r.since END AS "due_since?",
       r.max_running AS "max_running?", r.runs_per_minute AS "runs_per_minute?", r.max_queued AS "max_queued?",
       r.bucket AS "bucket?", r.total::bigint AS "total!", r.owners AS "owners!",
       r.by_size <= $3 AS "largest!", r.by_age <= $3 AND r.since <= now() AS "longest!",
       (SELECT count(*) FROM (SELECT 1 FROM runs h WHERE h.owner = r.owner AND h.state = 'claimed' LIMIT 100000) h) AS "held!"
FROM ranked r
WHERE r.by_size <= $3 OR (r.by_age <= $3 AND r.since <= now())
ORDER BY r.by_size
