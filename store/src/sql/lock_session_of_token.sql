-- A token's session never changes, so it may be found and locked at once.
SELECT id, owner, root_id, status, status_detail, hold, version, last_commit, turns, mail_seq, mail_cursor, mail_left,
       event_seq, deleted_at IS NOT NULL AS deleted
FROM sessions
WHERE id = (SELECT session_id FROM continuations WHERE token = $1 AND owner = $2)
FOR NO KEY UPDATE
