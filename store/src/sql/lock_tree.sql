-- A session and its descendants, deepest first. Locking is a statement of its own, by id.
WITH RECURSIVE tree AS (
    SELECT id, 0 AS depth, deleted_at FROM sessions WHERE id = $1
    UNION ALL
    SELECT s.id, t.depth + 1, s.deleted_at FROM sessions s JOIN tree t ON s.parent_id = t.id
)
SELECT id, depth FROM tree WHERE deleted_at IS NULL ORDER BY depth DESC, id
