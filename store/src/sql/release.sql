UPDATE runs r
SET state = 'queued', worker = NULL, lease_until = NULL, available_at = now() + make_interval(secs => $3::float8),
    takeovers = takeovers + $4
FROM UNNEST($1::uuid[], $2::bigint[]) AS held (session_id, epoch)
WHERE r.session_id = held.session_id AND r.epoch = held.epoch AND r.state = 'claimed'
