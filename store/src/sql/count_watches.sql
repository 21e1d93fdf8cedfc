SELECT count(*) FROM watches WHERE watcher = $1 AND expires_at > now()
