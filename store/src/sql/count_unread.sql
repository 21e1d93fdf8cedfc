-- What a mailbox's limit counts: mail that the model hasn't been told, orders apart.
SELECT count(*) FROM mail m JOIN sessions s ON s.id = m.session_id
WHERE m.session_id = $1 AND (m.seq > s.mail_cursor OR m.seq = ANY(s.mail_left)) AND m.tag <> 'control'
