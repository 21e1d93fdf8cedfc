SELECT l.pid AS "pid!", coalesce(a.application_name, '') AS "name!", coalesce(l.relation::regclass::text, l.locktype) AS "what!",
       l.mode AS "mode!", l.waitstart AS "since?", pg_blocking_pids(l.pid) AS "blocked_by!"
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE NOT l.granted AND a.datname = current_database()
ORDER BY l.waitstart LIMIT 5
