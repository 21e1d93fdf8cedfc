-- The open deferred calls of a session (of an owner, if one is named), in the order in which they were asked for. The state stands in an expression,
-- lest the server read the index of all open tokens.
SELECT c.token, c.session_id, c.agent, c.call_id, c.provider_id, c.tool, c.arguments, c.reason, c.state, c.approval,
       c.created_at, c.expires_at
FROM continuations c JOIN tool_calls t ON t.session_id = c.session_id AND t.id = c.call_id
WHERE c.session_id = $1 AND c.state || '' = 'open' AND (c.expires_at IS NULL OR c.expires_at > now())
  AND ($2::text IS NULL OR EXISTS (SELECT 1 FROM sessions s WHERE s.id = $1 AND s.owner = $2 AND s.deleted_at IS NULL))
ORDER BY t.turn, t.index
