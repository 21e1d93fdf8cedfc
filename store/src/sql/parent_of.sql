-- The call that a session answers, if it is one of a session's.
SELECT parent_id, parent_call FROM sessions WHERE id = $1 AND parent_call IS NOT NULL
