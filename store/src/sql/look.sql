-- What woke these runs, without touching them.
SELECT session_id, epoch, wake_seq, mode, false AS renewed FROM runs WHERE session_id = ANY($1) AND state = 'claimed'
