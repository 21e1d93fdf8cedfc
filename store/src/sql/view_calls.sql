-- The calls of a session that the model hasn't been told the end of, in the order in which they were asked for.
SELECT id, provider_id, name, state, settled, waits FROM tool_calls
WHERE session_id = $1 AND NOT told_result ORDER BY turn, index
