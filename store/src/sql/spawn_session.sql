-- A child session, beside the commit that its parent makes. Its agent is one that the parent's worker has, so it is
-- recorded; were it not, the child would wait for a worker that has it.
INSERT INTO sessions (id, owner, agent, agent_revision, parent_id, parent_call, root_id, status, priority, mail_seq, event_seq,
                      call_stack)
SELECT $2, p.owner, $3, coalesce((SELECT a.revision FROM agents a WHERE a.slug = $3 AND a.current), ''), p.id, $4, p.root_id,
       $5, p.priority, $6, $7, ltrim(p.call_stack || '/' || p.agent, '/')
FROM sessions p WHERE p.id = $1
