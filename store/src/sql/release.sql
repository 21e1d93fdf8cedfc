-- A death that somebody saw counts as one that an expiry tells of does (claim_expired).
-- Each run is looked up by its key, in the order of the ids, which is that of the locks everywhere.
WITH mine AS MATERIALIZED (
    SELECT run.session_id
    FROM (SELECT session_id, epoch FROM UNNEST($1::uuid[], $2::bigint[]) AS held (session_id, epoch) ORDER BY session_id) held
    CROSS JOIN LATERAL (
        SELECT r.session_id, r.state FROM runs r WHERE r.session_id = held.session_id AND r.epoch = held.epoch
        OFFSET 0 FOR UPDATE) run
    WHERE run.state = 'claimed'
)
UPDATE runs r
SET state = 'queued', worker = NULL, lease_until = NULL, available_at = now() + make_interval(secs => $3::float8),
    takeovers = CASE WHEN $4 = 0 THEN r.takeovers
                     WHEN (SELECT s.version FROM sessions s WHERE s.id = r.session_id) - r.takeover_version > 20 THEN $4
                     ELSE r.takeovers + $4 END,
    takeover_version = CASE WHEN $4 = 0 THEN r.takeover_version
                            ELSE (SELECT s.version FROM sessions s WHERE s.id = r.session_id) END
WHERE r.session_id = ANY(ARRAY(SELECT session_id FROM mine))
