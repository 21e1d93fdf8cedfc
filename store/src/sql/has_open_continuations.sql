-- The state stands in an expression, lest the server read the index of all open tokens.
SELECT EXISTS (SELECT 1 FROM continuations WHERE session_id = $1 AND state || '' = 'open')
