UPDATE owner_limits l SET bucket = n.bucket, filled_at = now()
FROM UNNEST($1::text[], $2::float8[]) AS n (owner, bucket)
WHERE l.owner = n.owner
