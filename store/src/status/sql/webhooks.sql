-- Endpoints, what waits for each and what was given up, counted up to $1, and since when its oldest unread event waits.
SELECT w.name AS "name!", w.disabled_at AS "disabled_at?", p.pending AS "pending!", p.oldest AS "oldest?", d.dead AS "dead!",
       (SELECT e.at FROM events e
        WHERE (e.xid, e.session_id, e.seq) > (w.xid, w.session_id, w.seq) AND e.xid < pg_snapshot_xmin(pg_current_snapshot())
        ORDER BY e.xid, e.session_id, e.seq LIMIT 1) AS "unread_since?",
       (SELECT l.last_error FROM webhook_deliveries l WHERE l.endpoint = w.name AND l.state = 'pending' AND l.last_error IS NOT NULL
        ORDER BY l.due_at LIMIT 1) AS "last_error?"
FROM (SELECT * FROM webhook_endpoints WHERE withdrawn_at IS NULL ORDER BY name LIMIT 1000) w
CROSS JOIN LATERAL (SELECT count(*) AS pending, min(queued_at) AS oldest FROM (
    SELECT queued_at FROM webhook_deliveries WHERE endpoint = w.name AND state = 'pending' ORDER BY due_at LIMIT $1) q) p
CROSS JOIN LATERAL (SELECT count(*) AS dead FROM (
    SELECT 1 FROM webhook_deliveries WHERE endpoint = w.name AND state = 'dead' ORDER BY due_at LIMIT $1) q) d
ORDER BY w.name
