-- What busy connections are waiting for at this moment; none is a processor.
SELECT coalesce(wait_event_type || ':' || wait_event, 'CPU') AS "wait!", count(*) AS "connections!"
FROM pg_stat_activity
WHERE state = 'active' AND pid <> pg_backend_pid() AND backend_type = 'client backend'
GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 5
