INSERT INTO events (session_id, seq, owner, kind, body)
SELECT * FROM UNNEST($1::uuid[], $2::bigint[], $3::text[], $4::text[], $5::text[])
