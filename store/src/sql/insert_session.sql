INSERT INTO sessions (id, owner, agent, agent_revision, parent_id, parent_call, root_id, status, priority, labels)
VALUES ($1, $2, $3, $4, $5, $6, $7, 'ready', $8, $9)
