DELETE FROM idempotency_keys WHERE principal = $1 AND key = $2 AND created_at < now() - interval '24 hours'
