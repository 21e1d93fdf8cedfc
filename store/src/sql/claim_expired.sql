-- A dead worker's runs. Expiries that a restart of the server explains don't count as takeovers.
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
    takeovers = r.takeovers + CASE WHEN r.lease_until <= pg_postmaster_start_time() + make_interval(secs => $3::float8) THEN 0 ELSE 1 END
FROM due WHERE r.session_id = due.session_id
RETURNING r.session_id, r.owner, r.agent, r.agent_revision, r.mode, r.epoch, r.wake_seq, r.takeovers, r.traceparent
