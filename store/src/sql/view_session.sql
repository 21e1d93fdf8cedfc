-- A session as clients read it; of an owner, if one is named.
SELECT s.id, s.owner, s.agent, s.agent_revision, s.parent_id, s.forked_from, s.status, s.status_detail, s.version,
       s.settings_rev, s.labels, s.turns, s.event_seq, s.created_at, s.updated_at,
       coalesce(r.mode <> 'none', false) AS active, r.parked_on,
       CASE WHEN r.state = 'parked' AND isfinite(r.available_at) THEN r.available_at END AS wakes_at
FROM sessions s LEFT JOIN runs r ON r.session_id = s.id
WHERE s.id = $1 AND ($2::text IS NULL OR s.owner = $2) AND s.deleted_at IS NULL
