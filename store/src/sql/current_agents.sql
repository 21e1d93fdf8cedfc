SELECT slug, revision FROM agents WHERE slug = ANY($1) AND current
