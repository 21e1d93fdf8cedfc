UPDATE sessions
SET version = version + 1, last_commit = $3, status = $4, status_detail = $5, hold = $6, turns = $7, mail_cursor = $8,
    mail_left = $9, event_seq = $10, agent_revision = $11, updated_at = now()
WHERE id = $1 AND version = $2
