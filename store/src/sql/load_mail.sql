-- Mail above cursors, by the place of each in what was asked: one session may be asked for twice. Unsorted: the
-- reader sorts.
SELECT n.place, m.id, m.seq, m.sender, m.priority, m.hops, m.body, m.sent_at
FROM UNNEST($1::uuid[], $2::bigint[]) WITH ORDINALITY AS n (session_id, cursor, place) CROSS JOIN LATERAL (
    SELECT id, seq, sender, priority, hops, body, sent_at
    FROM mail WHERE session_id = n.session_id AND seq > n.cursor
    OFFSET 0) m
