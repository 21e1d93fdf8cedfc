-- A statement after the one that locked these owners' limits: its snapshot has what earlier claims took.
SELECT o.owner, (SELECT count(*) FROM runs r WHERE r.owner = o.owner AND r.state = 'claimed') AS held
FROM UNNEST($1::text[]) AS o (owner)
