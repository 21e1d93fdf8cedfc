-- The row that comes back, not the intention, decides what is run. Only run rows are locked.
WITH due AS MATERIALIZED (
    SELECT session_id FROM runs
    WHERE state = 'queued' AND available_at <= now()
      AND (agent || '@' || agent_revision = ANY($4::text[])
           OR agent IN (SELECT slug FROM agents WHERE current AND slug || '@' || revision = ANY($4::text[])))
    ORDER BY priority DESC, available_at, session_id
    LIMIT $2
    FOR UPDATE SKIP LOCKED
)
UPDATE runs r
SET state = 'claimed', worker = $1, lease_until = now() + make_interval(secs => $3::float8), epoch = nextval('run_epochs')
FROM due WHERE r.session_id = due.session_id
RETURNING r.session_id, r.owner, r.agent, r.agent_revision, r.mode, r.epoch, r.wake_seq, r.takeovers, r.traceparent
