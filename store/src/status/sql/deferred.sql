-- Open deferred calls, counted up to $2, and those whose deadline has passed.
SELECT (SELECT count(*) FROM (SELECT 1 FROM continuations WHERE state = 'open' AND ($1::text IS NULL OR owner = $1) ORDER BY owner, created_at, token LIMIT $2) o) AS "open!",
       d.overdue AS "overdue!", d.since AS "overdue_since?"
FROM (SELECT count(*) AS overdue, min(expires_at) AS since
      FROM (SELECT expires_at FROM continuations
            WHERE state = 'open' AND expires_at IS NOT NULL AND expires_at <= now() AND ($1::text IS NULL OR owner = $1)
            ORDER BY expires_at LIMIT $2) late) d
