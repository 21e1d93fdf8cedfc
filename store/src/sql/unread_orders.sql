SELECT EXISTS (SELECT 1 FROM mail WHERE session_id = $1 AND seq > $2 AND tag = 'control')
