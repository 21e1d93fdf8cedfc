-- What the second session is to the first: the lineages of both upwards, each step by the primary key. Sessions of
-- other owners and deleted ones have none; that is looked at outside, lest the server read all that aren't deleted.
WITH RECURSIVE above (start, id, parent_id, depth) AS (
    SELECT s.id, s.id, s.parent_id, 0
    FROM UNNEST(ARRAY[$1::uuid, $2::uuid]) AS start (id)
    CROSS JOIN LATERAL (SELECT * FROM sessions WHERE id = start.id OFFSET 0) s
    WHERE s.owner = $3 AND s.deleted_at IS NULL
    UNION ALL
    SELECT a.start, s.id, s.parent_id, a.depth + 1
    FROM above a JOIN sessions s ON s.id = a.parent_id
    WHERE a.depth < $4
)
SELECT bool_or(start = $1) AND bool_or(start = $2) AS known,
       bool_or(start = $1 AND id = $2 AND depth > 0) AS ancestor,
       bool_or(start = $2 AND id = $1 AND depth > 0) AS descendant
FROM above
