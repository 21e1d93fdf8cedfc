SELECT id, seq, sender, priority, hops, body, sent_at
FROM mail WHERE session_id = $1 AND seq > $2 ORDER BY seq
