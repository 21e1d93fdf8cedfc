INSERT INTO mail (session_id, seq, id, sender, priority, hops, tag, body, wakes)
SELECT * FROM UNNEST($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::text[], $6::integer[], $7::text[], $8::text[], $9::boolean[])
