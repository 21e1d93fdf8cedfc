-- Runs by their names, in this order, as many as there are slots for; each is looked up by its key, and one that
-- somebody else has locked is stepped over. Throttled owners' runs are claimed with $6 alone, behind their lock.
WITH due AS MATERIALIZED (
    SELECT run.session_id
    FROM UNNEST($5::uuid[]) AS named (session_id)
    CROSS JOIN LATERAL (
        SELECT r.session_id, r.agent, r.agent_revision, r.owner
        FROM runs r WHERE r.session_id = named.session_id AND r.state || '' = 'queued' AND r.available_at <= now()
        OFFSET 0 FOR UPDATE SKIP LOCKED) run
    WHERE (run.agent || '@' || run.agent_revision = ANY($4::text[])
           OR run.agent IN (SELECT slug FROM agents WHERE current AND slug || '@' || revision = ANY($4::text[])))
      AND ($6 OR NOT EXISTS (SELECT 1 FROM owner_limits l
                             WHERE l.owner = run.owner AND (l.max_running IS NOT NULL OR l.runs_per_minute IS NOT NULL)))
    LIMIT $2
)
UPDATE runs r
SET state = 'claimed', worker = $1, lease_until = now() + make_interval(secs => $3::float8), epoch = nextval('run_epochs')
WHERE r.session_id = ANY(ARRAY(SELECT session_id FROM due))
RETURNING r.session_id, r.owner, r.agent, r.agent_revision, r.mode, r.epoch, r.wake_seq, r.takeovers, r.traceparent
