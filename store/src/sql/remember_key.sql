INSERT INTO idempotency_keys (principal, key, hash, code, resource)
VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (principal, key) DO NOTHING
