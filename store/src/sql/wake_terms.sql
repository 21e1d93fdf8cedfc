-- Which mail wakes sessions, as their agents' current rows have it. No row means the defaults.
SELECT s.id, a.wake_on, a.resume_on_any_mail
FROM sessions s JOIN agents a ON a.slug = s.agent AND a.current
WHERE s.id = ANY($1)
