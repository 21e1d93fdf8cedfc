-- Watches with something to do, those first that waited longest: there are events that they haven't looked at and
-- their watcher's mailbox has room, or they end. A mailbox's orders count here, which have places of their own: then
-- a watch waits a little longer.
SELECT w.watcher, w.id
FROM watches w
LEFT JOIN sessions watcher ON watcher.id = w.watcher
LEFT JOIN sessions watched ON watched.id = w.watched
WHERE w.due_at <= now()
  AND (watcher.id IS NULL OR watcher.deleted_at IS NOT NULL OR w.expires_at <= now() - interval '1 day'
       OR (watcher.mail_seq - watcher.mail_cursor + cardinality(watcher.mail_left) < $2
           AND (watched.event_seq > w.cursor OR w.expires_at <= now()
                OR watched.id IS NULL OR watched.deleted_at IS NOT NULL)))
ORDER BY w.due_at
LIMIT $1
