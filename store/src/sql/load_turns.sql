-- Unsorted: the reader sorts, which costs nothing where rows come in the order of the index.
SELECT session_id, position, id, tag, format, body, at FROM turns WHERE session_id = ANY($1)
