SELECT pg_database_size(current_database()) AS "bytes!", blks_hit AS "hits!", blks_read AS "reads!",
       deadlocks AS "deadlocks!", temp_bytes AS "spilled_bytes!", stats_reset AS "counted_since?"
FROM pg_stat_database WHERE datname = current_database()
