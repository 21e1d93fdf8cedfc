-- Owners that another claim is about are left to it.
SELECT owner, max_running, runs_per_minute,
       CASE WHEN runs_per_minute IS NOT NULL
            THEN least(runs_per_minute, bucket + extract(epoch FROM greatest(now() - filled_at, interval '0'))::float8 * runs_per_minute / 60)
       END AS bucket
FROM owner_limits
WHERE owner = ANY($1)
ORDER BY owner
FOR UPDATE SKIP LOCKED
