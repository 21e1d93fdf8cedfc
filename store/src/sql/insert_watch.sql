INSERT INTO watches (watcher, id, watched, kinds, tool, cursor, expires_at)
VALUES ($1, $2, $3, $4, $5, $6, now() + make_interval(secs => $7::float8))
RETURNING expires_at
