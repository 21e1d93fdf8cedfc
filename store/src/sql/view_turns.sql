-- The newest turns of a session below $2, newest first: at most $3, and no more than the first two that come to more than
-- $4 bytes; nothing if an owner is named whose session it isn't.
SELECT position, id, tag, format, body, at
FROM (SELECT *, row_number() OVER so_far AS number, sum(octet_length(body)) OVER so_far AS bytes
      FROM (SELECT * FROM turns WHERE session_id = $1 AND position < $2 AND ($5::text IS NULL OR EXISTS (SELECT 1 FROM sessions s WHERE s.id = $1 AND s.owner = $5 AND s.deleted_at IS NULL))
            ORDER BY position DESC LIMIT $3) AS asked
      WINDOW so_far AS (ORDER BY position DESC ROWS UNBOUNDED PRECEDING)) AS counted
WHERE number <= 2 OR bytes <= $4 ORDER BY position DESC
