-- Calls that earlier steps stored. Their sessions' rows are locked. The arguments of a call whose end has been
-- told stand in the turn that asked for it, and nobody reads them here any more.
UPDATE tool_calls c
SET state = n.state, attempt = n.attempt, token = n.token, expires_at = n.expires_at, started_at = n.started_at,
    settled = n.settled, finished_at = n.finished_at, told = n.told, told_result = n.told_result,
    waits = n.waits, read = n.read,
    arguments = CASE WHEN n.told_result THEN '' ELSE c.arguments END
FROM UNNEST($1::uuid[], $2::uuid[], $3::text[], $4::integer[], $5::uuid[], $6::timestamptz[], $7::timestamptz[],
            $8::text[], $9::timestamptz[], $10::bigint[], $11::boolean[], $12::text[], $13::boolean[])
     AS n (session_id, id, state, attempt, token, expires_at, started_at, settled, finished_at, told, told_result, waits,
           read)
WHERE c.session_id = n.session_id AND c.id = n.id
