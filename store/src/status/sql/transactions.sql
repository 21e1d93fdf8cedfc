SELECT pid AS "pid!", coalesce(application_name, '') AS "name!", datname::text AS "database?", state AS "state?",
       xact_start AS "since!", wait_event_type AS "wait_type?", wait_event AS "wait?"
FROM pg_stat_activity
WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'
ORDER BY xact_start LIMIT 3
