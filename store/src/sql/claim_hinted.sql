-- Runs that a hint named, where nothing else was due: throttled owners' are left to the claim that counts.
WITH due AS MATERIALIZED (
    SELECT r.session_id FROM runs r
    WHERE r.session_id = ANY($5) AND r.state = 'queued' AND r.available_at <= now()
      AND (r.agent || '@' || r.agent_revision = ANY($4::text[])
           OR r.agent IN (SELECT slug FROM agents WHERE current AND slug || '@' || revision = ANY($4::text[])))
      AND NOT EXISTS (SELECT 1 FROM owner_limits l
                      WHERE l.owner = r.owner AND (l.max_running IS NOT NULL OR l.runs_per_minute IS NOT NULL))
    ORDER BY r.session_id
    LIMIT $2
    FOR UPDATE OF r SKIP LOCKED
)
UPDATE runs r
SET state = 'claimed', worker = $1, lease_until = now() + make_interval(secs => $3::float8), epoch = nextval('run_epochs')
FROM due WHERE r.session_id = due.session_id
RETURNING r.session_id, r.owner, r.agent, r.agent_revision, r.mode, r.epoch, r.wake_seq, r.takeovers, r.traceparent
