-- One look backwards over $4 events from a place on: the failures among them, and where the look ended, which is
-- the row without a session.
WITH looked AS MATERIALIZED (
    SELECT xid, session_id, seq, owner, kind, at, CASE WHEN kind = 'session.failed' THEN body END AS body
    FROM events WHERE (xid, session_id, seq) < ($1::text::xid8, $2::uuid, $3::bigint)
    ORDER BY xid DESC, session_id DESC, seq DESC LIMIT $4
)
SELECT f.session_id AS "session?", f.at AS "at!", f.body AS "body?", ''::text AS "xid!", f.session_id AS "place!", 0::bigint AS "seq!", 0::bigint AS "looked!"
FROM looked f WHERE f.kind = 'session.failed' AND ($5::text IS NULL OR f.owner = $5)
UNION ALL
(SELECT NULL, l.at, NULL, l.xid::text, l.session_id, l.seq, (SELECT count(*) FROM looked)
 FROM looked l ORDER BY l.xid, l.session_id, l.seq LIMIT 1)
