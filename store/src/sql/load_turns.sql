-- Unsorted: the reader sorts, which costs nothing where rows come in the order of the index.
SELECT session_id, position, id, tag, format, body, at FROM turns WHERE session_id = ANY(CASE WHEN $2::uuid IS NULL THEN $1 ELSE ARRAY(SELECT r.session_id FROM runs r WHERE r.session_id = ANY($1) AND r.worker = $2) END)
