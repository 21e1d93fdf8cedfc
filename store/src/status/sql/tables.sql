-- Tables by the room that they take, indexes and oversized values included; partitions as the table that they are of.
SELECT coalesce(p.relname, s.relname)::text AS "name!", sum(s.n_live_tup)::bigint AS "live!", sum(s.n_dead_tup)::bigint AS "dead!",
       max(greatest(s.last_vacuum, s.last_autovacuum)) AS "vacuumed_at?",
       sum(pg_total_relation_size(s.relid))::bigint AS "bytes!"
FROM pg_stat_user_tables s
LEFT JOIN pg_inherits i ON i.inhrelid = s.relid
LEFT JOIN pg_class p ON p.oid = i.inhparent
WHERE s.schemaname = current_schema()
GROUP BY 1 ORDER BY 5 DESC LIMIT 20
