DELETE FROM runs WHERE session_id = ANY($1)
