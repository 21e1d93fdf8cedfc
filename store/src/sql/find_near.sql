-- Sessions near one whose ids end so: of its whole tree, or of what is above it ($5) and below it, as far as $6
-- sessions. Every step enters an index by a key; whether a session is deleted is looked at outside.
WITH RECURSIVE above (id, parent_id, depth) AS (
    SELECT s.id, s.parent_id, 0
    FROM (SELECT * FROM sessions WHERE id = $1 OFFSET 0) s
    WHERE s.owner = $2 AND s.deleted_at IS NULL
    UNION ALL
    SELECT s.id, s.parent_id, a.depth + 1
    FROM above a JOIN sessions s ON s.id = a.parent_id
    WHERE a.depth < $3
), below (id, depth) AS (
    SELECT a.id, 0 FROM above a WHERE CASE WHEN $4 THEN a.parent_id IS NULL ELSE a.depth = 0 END
    UNION ALL
    SELECT s.id, b.depth + 1
    FROM below b
    CROSS JOIN LATERAL (SELECT id, deleted_at FROM sessions WHERE parent_id = b.id OFFSET 0) s
    WHERE s.deleted_at IS NULL AND b.depth < $3
)
SELECT DISTINCT near.id
FROM (SELECT id FROM above WHERE $5 UNION ALL (SELECT id FROM below LIMIT $6)) near
WHERE right(near.id::text, 8) = $7
LIMIT 2
