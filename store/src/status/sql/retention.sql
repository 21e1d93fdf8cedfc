SELECT (SELECT count(*) FROM (SELECT 1 FROM sessions WHERE deleted_at IS NOT NULL AND ($1::text IS NULL OR owner = $1) ORDER BY deleted_at LIMIT $2) d) AS "deleted!",
       (SELECT min(deleted_at) FROM sessions WHERE deleted_at IS NOT NULL AND ($1::text IS NULL OR owner = $1)) AS "deleted_since?",
       (SELECT count(*) FROM (SELECT 1 FROM archives WHERE ($1::text IS NULL OR owner = $1) LIMIT $2) a) AS "archives!",
       (SELECT count(*) FROM (SELECT 1 FROM archives WHERE archived_at < now() - make_interval(days => $3) AND ($1::text IS NULL OR owner = $1) ORDER BY archived_at LIMIT $2) a) AS "old_archives!",
       (SELECT count(*) FROM (SELECT 1 FROM idempotency_keys WHERE created_at < now() - interval '25 hours' ORDER BY created_at LIMIT $2) k) AS "old_keys!"
