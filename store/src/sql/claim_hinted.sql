-- Runs that a hint named, where nothing else was due, each looked up by its key. Throttled owners' are left to the
-- claim that counts.
WITH due AS MATERIALIZED (
    SELECT run.session_id
    FROM UNNEST($5::uuid[]) AS hint (session_id)
    CROSS JOIN LATERAL (
        SELECT r.session_id, r.state, r.available_at, r.agent, r.agent_revision, r.owner
        FROM runs r WHERE r.session_id = hint.session_id
        OFFSET 0 FOR UPDATE SKIP LOCKED) run
    WHERE run.state = 'queued' AND run.available_at <= now()
      AND (run.agent || '@' || run.agent_revision = ANY($4::text[])
           OR run.agent IN (SELECT slug FROM agents WHERE current AND slug || '@' || revision = ANY($4::text[])))
      AND NOT EXISTS (SELECT 1 FROM owner_limits l
                      WHERE l.owner = run.owner AND (l.max_running IS NOT NULL OR l.runs_per_minute IS NOT NULL))
    LIMIT $2
)
UPDATE runs r
SET state = 'claimed', worker = $1, lease_until = now() + make_interval(secs => $3::float8), epoch = nextval('run_epochs')
WHERE r.session_id = ANY(ARRAY(SELECT session_id FROM due))
RETURNING r.session_id, r.owner, r.agent, r.agent_revision, r.mode, r.epoch, r.wake_seq, r.takeovers, r.traceparent
