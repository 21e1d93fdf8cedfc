DELETE FROM continuations WHERE session_id = ANY($1)
