SELECT EXISTS (SELECT 1 FROM continuations WHERE session_id = $1 AND state = 'open')
