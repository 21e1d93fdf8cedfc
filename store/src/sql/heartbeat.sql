-- One statement a worker, for the leases that it holds in memory and no others. A row that somebody has
-- locked is neither renewed nor lost: waiting for it would hold up all the others. The answer carries
-- what woke each run, so that an order needs no notification.
WITH held AS MATERIALIZED (
    SELECT session_id, epoch FROM UNNEST($1::uuid[], $2::bigint[]) AS held (session_id, epoch)
), free AS MATERIALIZED (
    SELECT r.session_id FROM runs r JOIN held h ON h.session_id = r.session_id
    WHERE r.epoch = h.epoch AND r.state = 'claimed'
    ORDER BY r.session_id
    FOR UPDATE OF r SKIP LOCKED
), renewed AS (
    UPDATE runs r SET lease_until = now() + make_interval(secs => $3::float8)
    FROM free WHERE r.session_id = free.session_id
    RETURNING r.session_id
)
SELECT r.session_id, r.epoch, r.wake_seq, r.mode, n.session_id IS NOT NULL AS renewed
FROM held h JOIN runs r ON r.session_id = h.session_id AND r.epoch = h.epoch AND r.state = 'claimed'
LEFT JOIN renewed n ON n.session_id = r.session_id
