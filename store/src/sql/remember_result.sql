INSERT INTO tool_results (owner, key, result, expires_at)
VALUES ($1, $2, $3, now() + make_interval(secs => $4))
ON CONFLICT (owner, key) DO UPDATE
SET result = excluded.result, stored_at = excluded.stored_at, expires_at = excluded.expires_at
