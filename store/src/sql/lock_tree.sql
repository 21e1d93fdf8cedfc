-- A session and its descendants, deepest first. Locking is a statement of its own, by id.
WITH RECURSIVE tree AS (
    SELECT id, 0 AS depth FROM sessions WHERE id = $1
    UNION ALL
    SELECT s.id, t.depth + 1 FROM sessions s JOIN tree t ON s.parent_id = t.id
)
SELECT t.id, t.depth FROM tree t JOIN sessions s ON s.id = t.id
WHERE s.deleted_at IS NULL
ORDER BY t.depth DESC, t.id
