UPDATE continuations SET state = 'cancelled', settled_at = now()
WHERE token IN (SELECT token FROM continuations WHERE session_id = $1 AND state = 'open' AND (call_id = ANY($2) OR $2 IS NULL) ORDER BY token FOR UPDATE)
