-- The oldest open call of each of up to 10,000 owners, by a skip scan over them; the oldest of those.
WITH RECURSIVE firsts (owner, token) AS (
    (SELECT owner, token FROM continuations WHERE state = 'open' AND ($1::text IS NULL OR owner = $1)
     ORDER BY owner, created_at, token LIMIT 1)
    UNION ALL
    SELECT next.owner, next.token FROM firsts CROSS JOIN LATERAL (
        SELECT c.owner, c.token FROM continuations c
        WHERE c.state = 'open' AND c.owner > firsts.owner AND $1::text IS NULL
        ORDER BY c.owner, c.created_at, c.token LIMIT 1) next
)
SELECT c.session_id AS "session!", c.owner AS "owner!", c.agent AS "agent!", c.tool AS "tool!", c.reason AS "reason!",
       c.created_at AS "since!", c.expires_at AS "expires_at?"
FROM (SELECT token FROM firsts LIMIT 10000) f JOIN continuations c ON c.token = f.token
ORDER BY c.created_at LIMIT $2
