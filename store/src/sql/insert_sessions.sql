INSERT INTO sessions (id, owner, agent, agent_revision, parent_id, parent_call, root_id, status, priority, labels, mail_seq,
                      event_seq, call_stack)
SELECT n.*, coalesce((SELECT ltrim(p.call_stack || '/' || p.agent, '/') FROM sessions p WHERE p.id = n.parent_id), '')
FROM UNNEST($1::uuid[], $2::text[], $3::text[], $4::text[], $5::uuid[], $6::uuid[], $7::uuid[], $8::text[],
            $9::smallint[], $10::text[], $11::bigint[], $12::bigint[])
     AS n (id, owner, agent, agent_revision, parent_id, parent_call, root_id, status, priority, labels, mail_seq, event_seq)
