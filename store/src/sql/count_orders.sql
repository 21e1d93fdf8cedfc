-- Orders that no step has obeyed yet.
SELECT count(*) FROM mail m JOIN sessions s ON s.id = m.session_id
WHERE m.session_id = $1 AND (m.seq > s.mail_cursor OR m.seq = ANY(s.mail_left)) AND m.tag = 'control'
