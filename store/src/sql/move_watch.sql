UPDATE watches SET cursor = $3, due_at = now() WHERE watcher = $1 AND id = $2
