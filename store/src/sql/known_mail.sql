SELECT id FROM mail WHERE session_id = $1 AND id = ANY($2)
