-- A dead worker's runs. Takeovers are counted over a run's last 20 versions; expiries that a restart of
-- the server explains don't count, nor those of a worker that has been heard of when it should have renewed the
-- lease: it lives, and was only late. That says nothing of a run under suspicion, which a process of its own renews.
WITH due AS MATERIALIZED (
    SELECT session_id FROM runs
    WHERE state = 'claimed' AND lease_until < now()
      AND (agent || '@' || agent_revision = ANY($4::text[])
           OR agent IN (SELECT slug FROM agents WHERE current AND slug || '@' || revision = ANY($4::text[])))
    ORDER BY session_id
    LIMIT $2
    FOR UPDATE SKIP LOCKED
)
UPDATE runs r
SET worker = $1, lease_until = now() + make_interval(secs => $3::float8), epoch = nextval('run_epochs'),
    takeovers = CASE WHEN r.lease_until <= pg_postmaster_start_time() + make_interval(secs => $3::float8) THEN r.takeovers
                     WHEN r.takeovers < 2 AND EXISTS (SELECT 1 FROM workers w WHERE w.id = r.worker
                                  AND w.seen_at > r.lease_until - make_interval(secs => $3::float8 / 3)) THEN r.takeovers
                     WHEN s.version - r.takeover_version > 20 THEN 1
                     ELSE r.takeovers + 1 END,
    takeover_version = s.version
FROM due JOIN sessions s ON s.id = due.session_id
WHERE r.session_id = due.session_id
RETURNING r.session_id, r.owner, r.agent, r.agent_revision, r.mode, r.epoch, r.wake_seq, r.takeovers, r.traceparent
