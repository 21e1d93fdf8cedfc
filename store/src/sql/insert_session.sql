INSERT INTO sessions (id, owner, agent, agent_revision, parent_id, parent_call, root_id, status, priority, labels, mail_seq,
                      event_seq, call_stack)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12,
        coalesce((SELECT ltrim(p.call_stack || '/' || p.agent, '/') FROM sessions p WHERE p.id = $5), ''))
