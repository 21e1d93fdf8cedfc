DELETE FROM watches WHERE watcher = $1 AND id = $2
