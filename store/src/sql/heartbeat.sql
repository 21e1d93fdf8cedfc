-- One statement a worker, for the leases that it holds in memory and no others, each looked up by its key: the
-- state is looked at outside, lest the server read the whole index of claimed runs. A row that somebody has
-- locked is neither renewed nor lost: waiting for it would hold up all the others. So each lease that stands comes
-- back once as it is, with what woke its run, and once more if it was renewed; a join of the two would compare all
-- with all.
WITH held AS MATERIALIZED (
    SELECT session_id, epoch FROM UNNEST($1::uuid[], $2::bigint[]) AS held (session_id, epoch)
), free AS MATERIALIZED (
    SELECT mine.session_id FROM held h CROSS JOIN LATERAL (
        SELECT r.session_id, r.state FROM runs r WHERE r.session_id = h.session_id AND r.epoch = h.epoch
        OFFSET 0 FOR UPDATE SKIP LOCKED) mine
    WHERE mine.state = 'claimed'
), renewed AS (
    UPDATE runs r SET lease_until = now() + make_interval(secs => $3::float8)
    WHERE r.session_id = ANY(ARRAY(SELECT session_id FROM free))
    RETURNING r.session_id, r.epoch, r.wake_seq, r.mode
)
SELECT r.session_id, r.epoch, r.wake_seq, r.mode, false AS renewed
FROM held h CROSS JOIN LATERAL (
    SELECT session_id, epoch, wake_seq, mode, state FROM runs WHERE session_id = h.session_id AND epoch = h.epoch
    OFFSET 0) r
WHERE r.state = 'claimed'
UNION ALL
SELECT session_id, epoch, wake_seq, mode, true FROM renewed
