SELECT call_id, provider_id, tool, state, result_hash, on_deadline, approval,
       (state = 'open' AND expires_at IS NOT NULL AND expires_at <= now()) AS overdue
FROM continuations WHERE token = $1 AND owner = $2 FOR UPDATE
