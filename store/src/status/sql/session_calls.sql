-- Calls of the session that aren't over: of the newest 1,000, whose ids rise.
SELECT c.id AS "id!", c.name AS "tool!", c.state AS "state!", c.idempotent AS "idempotent!", c.attempt AS "attempt!",
       coalesce(c.started_at, c.created_at) AS "since!", c.expires_at AS "expires_at?", k.reason AS "reason?"
FROM (SELECT * FROM tool_calls WHERE session_id = $1 ORDER BY id DESC LIMIT 1000) c
LEFT JOIN continuations k ON k.token = c.token
WHERE c.state IN ('ready', 'running', 'deferred') ORDER BY c.id LIMIT 50
