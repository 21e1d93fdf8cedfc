SELECT token, session_id FROM continuations
WHERE state = 'open' AND expires_at <= now()
ORDER BY expires_at LIMIT $1
