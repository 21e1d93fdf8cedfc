-- The one way in which an open token is settled from outside. Its row is locked and was seen open; were it
-- not, the division would end the transaction. The state stands in an expression, lest the server read the index
-- of all open tokens.
WITH settled AS (
    UPDATE continuations SET state = $2, result_hash = $3, settled_at = now()
    WHERE token = $1 AND state || '' = 'open'
    RETURNING 1
)
SELECT 1 / count(*) FROM settled
