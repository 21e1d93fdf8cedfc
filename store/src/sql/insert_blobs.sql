-- Blobs are locked by key, after everything else.
INSERT INTO blobs (owner, digest, body)
SELECT o, d, b FROM UNNEST($1::text[], $2::bytea[], $3::text[]) AS new (o, d, b)
ORDER BY o, d
ON CONFLICT DO NOTHING
