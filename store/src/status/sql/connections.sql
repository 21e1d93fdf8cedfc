SELECT current_setting('max_connections')::integer AS "limit!",
       current_setting('superuser_reserved_connections')::integer AS "reserved!",
       count(*) AS "used!",
       count(*) FILTER (WHERE application_name LIKE 'holdfast-%') AS "holdfast!",
       count(*) FILTER (WHERE state = 'active' AND pid <> pg_backend_pid()) AS "active!",
       count(*) FILTER (WHERE state LIKE 'idle in transaction%') AS "idle_in_transaction!",
       count(*) FILTER (WHERE wait_event_type = 'Lock') AS "waiting_for_locks!",
       pg_is_in_recovery() AS "standby!"
FROM pg_stat_activity WHERE backend_type = 'client backend'
