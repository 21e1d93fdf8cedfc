-- Each count goes as far as $2, in the order of the part's index: any other way to it may read all parked runs first.
SELECT (SELECT count(*) FROM (SELECT 1 FROM runs WHERE state = 'claimed' AND ($1::text IS NULL OR owner = $1) ORDER BY session_id LIMIT $2) c) AS "claimed!",
       (SELECT count(*) FROM (SELECT 1 FROM runs WHERE state = 'queued' AND ($1::text IS NULL OR owner = $1) ORDER BY owner LIMIT $2) q) AS "queued!",
       (SELECT count(*) FROM (SELECT 1 FROM runs WHERE state = 'queued' AND available_at <= now() AND ($1::text IS NULL OR owner = $1) ORDER BY available_at LIMIT $2) d) AS "due!",
       (SELECT count(*) FROM (SELECT 1 FROM runs WHERE state = 'parked' AND available_at < 'infinity' AND available_at < now() - interval '60 seconds'
                                AND ($1::text IS NULL OR owner = $1) ORDER BY available_at LIMIT $2) t) AS "late_timers!"
