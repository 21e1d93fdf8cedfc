SELECT EXISTS (SELECT 1 FROM tool_calls WHERE session_id = $1 AND state = 'waiting')
