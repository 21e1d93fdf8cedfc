INSERT INTO continuations (token, session_id, call_id, owner, agent, tool, reason, provider_id, arguments, created_at, expires_at,
                           on_deadline, approval)
SELECT token, session_id, call_id, owner, agent, tool, reason, provider_id, arguments, created_at, expires_at, on_deadline,
       approval
FROM UNNEST($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
            $10::timestamptz[], $11::timestamptz[], $12::text[], $13::boolean[])
     AS new (token, session_id, call_id, owner, agent, tool, reason, provider_id, arguments, created_at, expires_at,
            on_deadline, approval)
ORDER BY token
