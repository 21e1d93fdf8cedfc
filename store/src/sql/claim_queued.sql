-- A share of the free slots for each owner whose turn it is; within an owner, by priority and then by age.
-- The row that comes back, not the intention, decides what is run. Only run rows are locked.
WITH due AS MATERIALIZED (
    SELECT mine.session_id
    FROM UNNEST($5::text[], $6::bigint[]) WITH ORDINALITY AS turn (owner, share, place)
    CROSS JOIN LATERAL (
        SELECT r.session_id FROM runs r
        WHERE r.owner = turn.owner AND r.state = 'queued' AND r.available_at <= now()
          AND (r.agent || '@' || r.agent_revision = ANY($4::text[])
               OR r.agent IN (SELECT slug FROM agents WHERE current AND slug || '@' || revision = ANY($4::text[])))
        ORDER BY r.priority DESC, r.available_at, r.session_id
        LIMIT turn.share
        FOR UPDATE SKIP LOCKED
    ) mine
    ORDER BY turn.place
    LIMIT $2
)
UPDATE runs r
SET state = 'claimed', worker = $1, lease_until = now() + make_interval(secs => $3::float8), epoch = nextval('run_epochs')
WHERE r.session_id = ANY(ARRAY(SELECT session_id FROM due))
RETURNING r.session_id, r.owner, r.agent, r.agent_revision, r.mode, r.epoch, r.wake_seq, r.takeovers, r.traceparent
