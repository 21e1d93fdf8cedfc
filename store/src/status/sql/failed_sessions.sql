SELECT id AS "id!", owner AS "owner!", agent AS "agent!", status = 'failed' AS "still!"
FROM sessions WHERE id = ANY($1) AND deleted_at IS NULL
