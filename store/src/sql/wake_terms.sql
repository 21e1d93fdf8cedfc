-- Which mail wakes a session, as its agent's current row has it. No row means the defaults.
SELECT a.wake_on, a.resume_on_any_mail
FROM sessions s JOIN agents a ON a.slug = s.agent AND a.current
WHERE s.id = $1
