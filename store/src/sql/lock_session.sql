-- The lock that everybody takes first. Rows are locked in the order of their ids.
SELECT id, owner, root_id, status, status_detail, hold, version, last_commit, turns, mail_seq, mail_cursor, mail_left,
       event_seq, deleted_at IS NOT NULL AS deleted
FROM sessions
WHERE id = ANY($1)
ORDER BY id
FOR NO KEY UPDATE
