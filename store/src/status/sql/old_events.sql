-- Partitions of events whose day is over for longer than replay is promised: named after their day.
SELECT count(*) AS "partitions!", coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint AS "events!",
       coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint AS "bytes!", min(c.relname)::text AS "oldest?"
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'events'::regclass AND c.relname ~ '^events_[0-9]{8}$' AND c.relname < $1
