-- The newest order among these that no step has obeyed yet.
SELECT m.body
FROM sessions s JOIN mail m ON m.session_id = s.id AND m.seq > s.mail_cursor
WHERE s.id = $1 AND m.tag = 'control' AND m.body = ANY($2::text[])
ORDER BY m.seq DESC LIMIT 1
