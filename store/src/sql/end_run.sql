DELETE FROM runs WHERE session_id = $1 AND epoch = $2
