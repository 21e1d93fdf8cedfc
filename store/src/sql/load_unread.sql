-- What sessions haven't been told yet: above their cursors, or considered and waiting. Numbers begin at 1; that
-- they do is said so that the primary key is used, whatever the server guesses of the other index.
SELECT m.session_id, m.id, m.seq, m.sender, m.priority, m.hops, m.body, m.sent_at
FROM sessions s JOIN mail m ON m.session_id = s.id AND m.seq > 0 AND (m.seq > s.mail_cursor OR m.seq = ANY(s.mail_left))
WHERE s.id = ANY(CASE WHEN $2::uuid IS NULL THEN $1 ELSE ARRAY(SELECT r.session_id FROM runs r WHERE r.session_id = ANY($1) AND r.worker = $2) END)
