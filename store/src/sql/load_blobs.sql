SELECT digest, body FROM blobs WHERE owner = $1 AND digest = ANY($2)
