-- How long an owner's queue is, counted no further than its limit.
SELECT l.max_queued,
       (SELECT count(*) FROM (SELECT 1 FROM runs r WHERE r.owner = $1 AND r.state = 'queued' LIMIT l.max_queued) q) AS queued
FROM (SELECT coalesce((SELECT max_queued FROM owner_limits WHERE owner = $1), $2::integer)::bigint AS max_queued) l
