-- An accept appends mail and events and may set the session running; it never raises the version.
UPDATE sessions
SET mail_seq = $2, event_seq = $3, status = $4, status_detail = CASE WHEN $5 THEN NULL ELSE status_detail END,
    agent_revision = CASE WHEN $5 THEN coalesce((SELECT a.revision FROM agents a WHERE a.slug = sessions.agent AND a.current), agent_revision) ELSE agent_revision END,
    updated_at = now()
WHERE id = $1
