-- One statement a worker, for the leases that it holds in memory and no others. The answer carries
-- what woke each run, so that an order needs no notification.
UPDATE runs r
SET lease_until = now() + make_interval(secs => $3::float8)
FROM UNNEST($1::uuid[], $2::bigint[]) AS held (session_id, epoch)
WHERE r.session_id = held.session_id AND r.epoch = held.epoch AND r.state = 'claimed'
RETURNING r.session_id, r.epoch, r.wake_seq, r.mode
