-- The calls of a session (of an owner, if one is named) that the model hasn't been told the end of, in the order in
-- which they were asked for.
SELECT id, provider_id, name, state, settled, waits FROM tool_calls
WHERE session_id = $1 AND NOT told_result
  AND ($2::text IS NULL OR EXISTS (SELECT 1 FROM sessions s WHERE s.id = $1 AND s.owner = $2 AND s.deleted_at IS NULL))
ORDER BY turn, index
