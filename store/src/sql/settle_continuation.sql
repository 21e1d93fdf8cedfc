-- The one way in which an open token is settled from outside.
UPDATE continuations SET state = $2, result_hash = $3, settled_at = now()
WHERE token = $1 AND state = 'open'
RETURNING call_id
