-- What woke these runs, without touching them; each is looked up by its key.
SELECT r.session_id, r.epoch, r.wake_seq, r.mode, false AS renewed
FROM UNNEST($1::uuid[]) AS asked (session_id) CROSS JOIN LATERAL (
    SELECT session_id, epoch, wake_seq, mode, state FROM runs WHERE session_id = asked.session_id
    OFFSET 0) r
WHERE r.state = 'claimed'
