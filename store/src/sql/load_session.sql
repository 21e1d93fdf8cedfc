-- With a worker ($2), only those of the sessions whose runs it holds: the statements of a load may be sent behind a
-- claim of theirs, before it is known which it got.
SELECT s.id, s.owner, s.agent, s.agent_revision, s.parent_id, s.parent_call, s.status, s.hold, s.version, s.mail_cursor,
       s.mail_left, s.settings_rev, s.call_stack, s.deleted_at IS NOT NULL AS deleted, clock_timestamp() AS read_at
FROM sessions s WHERE s.id = ANY(CASE WHEN $2::uuid IS NULL THEN $1 ELSE ARRAY(SELECT r.session_id FROM runs r WHERE r.session_id = ANY($1) AND r.worker = $2) END)
