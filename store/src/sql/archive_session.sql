-- Bodies go in as they are: no JSON operator reads them.
INSERT INTO archives (session_id, owner, agent, parent_id, root_id, created_at, document)
SELECT s.id, s.owner, s.agent, s.parent_id, s.root_id, s.created_at, json_build_object(
    'session', json_build_object('id', s.id, 'owner', s.owner, 'agent', s.agent, 'agent_revision', s.agent_revision,
        'parent_id', s.parent_id, 'parent_call', s.parent_call, 'forked_from', s.forked_from, 'status', s.status,
        'status_detail', s.status_detail, 'version', s.version, 'labels', s.labels::json,
        'created_at', s.created_at, 'updated_at', s.updated_at),
    'turns', (SELECT coalesce(json_agg(json_build_object('position', t.position, 'id', t.id, 'tag', t.tag,
            'format', t.format, 'body', t.body::json, 'at', t.at) ORDER BY t.position), '[]')
        FROM turns t WHERE t.session_id = s.id),
    'calls', (SELECT coalesce(json_agg(json_build_object('id', c.id, 'turn', c.turn, 'index', c.index,
            'provider_id', c.provider_id, 'name', c.name, 'state', c.state, 'attempt', c.attempt,
            'decided_by', c.decided_by, 'created_at', c.created_at, 'started_at', c.started_at,
            'finished_at', c.finished_at, 'settled', c.settled::json) ORDER BY c.turn, c.index), '[]')
        FROM tool_calls c WHERE c.session_id = s.id))::text
FROM sessions s WHERE s.id = $1
ON CONFLICT DO NOTHING
