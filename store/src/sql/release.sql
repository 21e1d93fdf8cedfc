-- Rows are locked in the order of their ids, as everywhere.
WITH mine AS MATERIALIZED (
    SELECT r.session_id
    FROM UNNEST($1::uuid[], $2::bigint[]) AS held (session_id, epoch) JOIN runs r ON r.session_id = held.session_id
    WHERE r.epoch = held.epoch AND r.state = 'claimed'
    ORDER BY r.session_id
    FOR UPDATE OF r
)
UPDATE runs r
SET state = 'queued', worker = NULL, lease_until = NULL, available_at = now() + make_interval(secs => $3::float8),
    takeovers = takeovers + $4
FROM mine WHERE r.session_id = mine.session_id
