-- Parked runs stand in no index: a scan that ends at $2 of them.
SELECT count(*) AS "parked!" FROM (SELECT 1 FROM runs WHERE state = 'parked' AND ($1::text IS NULL OR owner = $1) LIMIT $2) p
