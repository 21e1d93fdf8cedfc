INSERT INTO turns (session_id, position, id, tag, format, body, version, at, input_tokens, output_tokens, cached_tokens)
SELECT * FROM UNNEST($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::smallint[], $6::text[], $7::bigint[],
                     $8::timestamptz[], $9::bigint[], $10::bigint[], $11::bigint[])
