SELECT watched, kinds, tool, expires_at FROM watches WHERE watcher = $1 AND id = $2
