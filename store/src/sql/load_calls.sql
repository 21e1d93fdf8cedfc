-- Unsorted, as the turns are.
SELECT session_id, id, turn, index, provider_id, name, arguments, disposition, decided_by, idempotent, deadline_seconds,
       state, attempt, token, expires_at, created_at, started_at, settled, finished_at, told, told_result, waits, read
FROM tool_calls WHERE session_id = ANY(CASE WHEN $2::uuid IS NULL THEN $1 ELSE ARRAY(SELECT r.session_id FROM runs r WHERE r.session_id = ANY($1) AND r.worker = $2) END) AND NOT told_result
