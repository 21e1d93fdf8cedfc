-- Whether what happens in the second session comes to the first by the watches that there are.
WITH RECURSIVE reached (session_id, depth) AS (
    SELECT $1::uuid, 0
    UNION
    SELECT w.watched, r.depth + 1
    FROM reached r JOIN watches w ON w.watcher = r.session_id
    WHERE w.expires_at > now() AND r.depth < $3
)
SELECT EXISTS (SELECT 1 FROM reached WHERE session_id = $2) AS circle
