-- An accept appends mail and events and may set the session running; it never raises the version.
UPDATE sessions s
SET mail_seq = n.mail_seq, event_seq = n.event_seq, status = n.status,
    status_detail = CASE WHEN n.starts THEN NULL ELSE s.status_detail END,
    agent_revision = CASE WHEN n.starts THEN coalesce((SELECT a.revision FROM agents a WHERE a.slug = s.agent AND a.current), s.agent_revision) ELSE s.agent_revision END,
    updated_at = now()
FROM UNNEST($1::uuid[], $2::bigint[], $3::bigint[], $4::text[], $5::boolean[]) AS n (id, mail_seq, event_seq, status, starts)
WHERE s.id = n.id
