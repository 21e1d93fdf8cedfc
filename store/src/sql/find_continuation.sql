SELECT session_id FROM continuations WHERE token = $1 AND owner = $2
