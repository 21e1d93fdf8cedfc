UPDATE watches SET due_at = now() + interval '1 minute' WHERE watcher = $1 AND id = $2
