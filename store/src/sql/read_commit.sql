SELECT s.version, s.last_commit, s.deleted_at IS NOT NULL AS deleted, r.epoch, r.state, r.wake_seq, r.mode
FROM sessions s LEFT JOIN runs r ON r.session_id = s.id
WHERE s.id = $1
