-- Leases by the worker that holds them, of the first $2.
SELECT h.worker AS "worker!", count(*) AS "held!", count(*) FILTER (WHERE h.lease_until < now()) AS "expired!",
       min(h.lease_until) AS "soonest!", count(*) FILTER (WHERE h.takeovers > 0) AS "taken_over!"
FROM (SELECT worker, lease_until, takeovers FROM runs WHERE state = 'claimed' AND ($1::text IS NULL OR owner = $1) ORDER BY session_id LIMIT $2) h
GROUP BY h.worker ORDER BY 3 DESC, 2 DESC, 1 LIMIT 1000
