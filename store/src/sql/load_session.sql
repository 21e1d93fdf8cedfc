SELECT s.id, s.owner, s.agent, s.agent_revision, s.parent_id, s.parent_call, s.status, s.hold, s.version, s.mail_cursor,
       s.mail_left, s.settings_rev, s.call_stack, s.deleted_at IS NOT NULL AS deleted, clock_timestamp() AS read_at
FROM sessions s WHERE s.id = ANY($1)
