SELECT seq FROM mail WHERE session_id = $1 AND id = $2
