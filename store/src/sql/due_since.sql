-- What has become due since $1, at most $2 of it (and, with $4, as much of the newest), by an index that is entered
-- there: entries of runs that were claimed before, which stay in it while anybody holds an old snapshot, aren't passed
-- over again. Always at least one row, with where the next look may begin: half a second before the oldest that waits, for
-- transactions that began before those of others and were committed after them. Owners that have used up what they may
-- are a hint, as in due_owners.
WITH due AS MATERIALIZED (
    (SELECT session_id, owner, priority, available_at,
            (agent || '@' || agent_revision = ANY($3::text[])
             OR agent IN (SELECT slug FROM agents WHERE current AND slug || '@' || revision = ANY($3::text[]))) AS served
     FROM runs
     WHERE state = 'queued' AND available_at > coalesce($1::timestamptz, '-infinity') AND available_at <= now()
     ORDER BY available_at
     LIMIT $2)
    UNION
    (SELECT session_id, owner, priority, available_at,
            (agent || '@' || agent_revision = ANY($3::text[])
             OR agent IN (SELECT slug FROM agents WHERE current AND slug || '@' || revision = ANY($3::text[]))) AS served
     FROM runs
     WHERE state = 'queued' AND available_at > coalesce($1::timestamptz, '-infinity') AND available_at <= now() AND $4
     ORDER BY available_at DESC
     LIMIT $2)
), limited AS MATERIALIZED (
    SELECT l.owner,
           (coalesce(l.runs_per_minute = 0, false)
            OR coalesce(l.bucket + extract(epoch FROM greatest(now() - l.filled_at, interval '0'))::float8 * l.runs_per_minute / 60 < 1, false)
            OR coalesce(l.max_running <= (SELECT count(*) FROM (SELECT 1 FROM runs h WHERE h.owner = l.owner AND h.state = 'claimed' LIMIT l.max_running) held), false)) AS spent
    FROM owner_limits l
    WHERE l.owner = ANY(ARRAY(SELECT DISTINCT owner FROM due)) AND (l.max_running IS NOT NULL OR l.runs_per_minute IS NOT NULL)
)
SELECT least((SELECT min(available_at) FROM due), now()) - interval '0.5 seconds' AS since,
       due.session_id, due.owner, due.priority, due.available_at, due.served AND NOT coalesce(limited.spent, false) AS claimable,
       limited.owner IS NOT NULL AS throttled
FROM (SELECT) one LEFT JOIN due ON true LEFT JOIN limited ON limited.owner = due.owner
