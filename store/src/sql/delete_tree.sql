UPDATE sessions SET deleted_at = now(), event_seq = event_seq + 1, updated_at = now()
WHERE id = ANY($1) AND deleted_at IS NULL
RETURNING id, owner, event_seq
