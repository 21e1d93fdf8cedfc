SELECT revision FROM agents WHERE slug = $1 AND current
