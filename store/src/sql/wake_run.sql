-- Always writes the run row, so that an ending run sees the wake on the row it locks. A parked run is due from now on,
-- not since its timer was.
INSERT INTO runs (session_id, owner, agent, agent_revision, mode, state, priority, wake_seq, traceparent)
SELECT s.id, s.owner, s.agent,
       coalesce((SELECT a.revision FROM agents a WHERE a.slug = s.agent AND a.current), s.agent_revision),
       n.mode, 'queued', s.priority, n.wake_seq, n.traceparent
FROM UNNEST($1::uuid[], $2::text[], $3::bigint[], $4::text[]) AS n (id, mode, wake_seq, traceparent)
JOIN sessions s ON s.id = n.id
ON CONFLICT (session_id) DO UPDATE SET
    wake_seq = greatest(runs.wake_seq, excluded.wake_seq),
    available_at = CASE WHEN runs.state = 'parked' THEN now() ELSE least(runs.available_at, now()) END,
    mode = CASE WHEN 'until_blocked' IN (runs.mode, excluded.mode) THEN 'until_blocked'
                WHEN 'step' IN (runs.mode, excluded.mode) THEN 'step'
                ELSE 'none' END,
    state = CASE WHEN runs.state = 'parked' THEN 'queued' ELSE runs.state END,
    parked_on = NULL,
    traceparent = coalesce(runs.traceparent, excluded.traceparent)
