-- One lease whose row was locked whenever a heartbeat came by: who accepts much mail leaves no gap, but lets those
-- who wait have their turn. One that has ended meanwhile isn't renewed: its holder has dropped it.
WITH mine AS MATERIALIZED (
    SELECT r.session_id, r.state, r.lease_until FROM runs r WHERE r.session_id = $1 AND r.epoch = $2
    OFFSET 0 FOR UPDATE
)
UPDATE runs r SET lease_until = greatest(r.lease_until, now() + make_interval(secs => $3::float8))
WHERE r.session_id = ANY(ARRAY(SELECT session_id FROM mine WHERE state = 'claimed' AND lease_until > clock_timestamp()))
RETURNING r.session_id, r.epoch, r.wake_seq, r.mode, true AS renewed
