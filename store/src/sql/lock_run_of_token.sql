SELECT session_id, mode, state, wake_seq, epoch, coalesce(parked_on = 'wait', false) AS waits
FROM runs
WHERE session_id = (SELECT session_id FROM continuations WHERE token = $1 AND owner = $2)
FOR UPDATE
