-- What ending and parking are decided by comes from this statement alone: READ COMMITTED re-checks
-- the row that it waited for, and nothing beside it.
SELECT session_id, mode, state, wake_seq, epoch, coalesce(parked_on = 'wait', false) AS waits
FROM runs
WHERE session_id = ANY($1)
ORDER BY session_id
FOR UPDATE
