-- A watch, and whether it ends when what happened before is passed on.
SELECT w.watched, w.kinds, w.tool, w.cursor, w.expires_at,
       w.expires_at <= now() AS expired, w.expires_at <= now() - interval '1 day' AS overdue,
       NOT EXISTS (SELECT 1 FROM sessions s WHERE s.id = w.watched AND s.deleted_at IS NULL) AS orphaned
FROM watches w WHERE w.watcher = $1 AND w.id = $2
FOR UPDATE
