SELECT hash, code, resource FROM idempotency_keys WHERE principal = $1 AND key = $2
