SELECT position, id, tag, format, body, at FROM turns WHERE session_id = $1 AND position > $2 ORDER BY position
