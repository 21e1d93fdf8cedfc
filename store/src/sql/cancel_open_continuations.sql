-- The state stands in an expression, lest the server read the index of all open tokens.
UPDATE continuations SET state = 'cancelled', settled_at = now()
WHERE token = ANY(ARRAY(
    SELECT token FROM continuations
    WHERE session_id = $1 AND state || '' = 'open' AND (call_id = ANY($2) OR $2 IS NULL)
    ORDER BY token FOR UPDATE))
