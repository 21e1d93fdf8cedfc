-- Whose turn it is: owners with due runs, from the cursor on and then from the start, by a skip scan that
-- touches one index entry an owner, however many runs each has. Owners that have used up what they may are passed
-- over; that is a hint, and who of the others is throttled is counted again under its lock.
WITH RECURSIVE ahead (owner) AS (
    (SELECT owner FROM runs WHERE state = 'queued' AND available_at <= now() AND owner > $1 ORDER BY owner LIMIT 1)
    UNION ALL
    SELECT next.owner FROM ahead CROSS JOIN LATERAL (
        SELECT r.owner FROM runs r WHERE r.state = 'queued' AND r.available_at <= now() AND r.owner > ahead.owner
        ORDER BY r.owner LIMIT 1) next
), wrapped (owner) AS (
    (SELECT owner FROM runs WHERE state = 'queued' AND available_at <= now() AND owner <= $1 ORDER BY owner LIMIT 1)
    UNION ALL
    SELECT next.owner FROM wrapped CROSS JOIN LATERAL (
        SELECT r.owner FROM runs r WHERE r.state = 'queued' AND r.available_at <= now() AND r.owner > wrapped.owner AND r.owner <= $1
        ORDER BY r.owner LIMIT 1) next
)
SELECT turn.owner, EXISTS (
    SELECT 1 FROM owner_limits l
    WHERE l.owner = turn.owner AND (l.max_running IS NOT NULL OR l.runs_per_minute IS NOT NULL)) AS throttled
FROM (SELECT owner FROM ahead UNION ALL SELECT owner FROM wrapped) turn
WHERE NOT EXISTS (
    SELECT 1 FROM owner_limits l
    WHERE l.owner = turn.owner
      AND (l.runs_per_minute = 0
           OR l.bucket + extract(epoch FROM greatest(now() - l.filled_at, interval '0'))::float8 * l.runs_per_minute / 60 < 1
           OR l.max_running <= (SELECT count(*) FROM (SELECT 1 FROM runs h WHERE h.owner = l.owner AND h.state = 'claimed' LIMIT l.max_running) held)))
LIMIT $2
