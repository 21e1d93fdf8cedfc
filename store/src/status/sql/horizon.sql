-- Who keeps dead rows from being removed: the oldest snapshot of a session, a slot or a prepared transaction.
SELECT h.kind AS "kind!", h.name AS "name!", h.pid AS "pid?", h.age::bigint AS "age!", h.since AS "since?"
FROM (SELECT 'session' AS kind, coalesce(application_name, '') AS name, pid, age(backend_xmin) AS age, xact_start AS since
      FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
      UNION ALL
      SELECT 'slot', slot_name::text, active_pid, greatest(age(xmin), age(catalog_xmin)), NULL
      FROM pg_replication_slots WHERE xmin IS NOT NULL OR catalog_xmin IS NOT NULL
      UNION ALL
      SELECT 'prepared', gid, NULL, age(transaction), prepared FROM pg_prepared_xacts) h
ORDER BY h.age DESC LIMIT 1
