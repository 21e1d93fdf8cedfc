-- What a session hasn't been told yet: above its cursor, or considered and waiting.
SELECT m.id, m.seq, m.sender, m.priority, m.hops, m.body, m.sent_at
FROM sessions s JOIN mail m ON m.session_id = s.id
WHERE s.id = $1 AND (m.seq > s.mail_cursor OR m.seq = ANY(s.mail_left))
ORDER BY m.seq
