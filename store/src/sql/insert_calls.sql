INSERT INTO tool_calls (session_id, id, turn, index, provider_id, name, arguments, disposition, decided_by, idempotent,
                        deadline_seconds, state, attempt, token, expires_at, created_at, started_at, settled, finished_at,
                        told, told_result, waits, read)
SELECT * FROM UNNEST($1::uuid[], $2::uuid[], $3::bigint[], $4::integer[], $5::text[], $6::text[], $7::text[], $8::text[],
                     $9::text[], $10::boolean[], $11::bigint[], $12::text[], $13::integer[], $14::uuid[],
                     $15::timestamptz[], $16::timestamptz[], $17::timestamptz[], $18::text[], $19::timestamptz[],
                     $20::bigint[], $21::boolean[], $22::text[], $23::boolean[])
