UPDATE sessions
SET version = version + 1, last_commit = $2, status = 'failed', status_detail = $3, event_seq = $4, updated_at = now()
WHERE id = $1
