-- Whether all these sessions rest, have rested for so many days, and nothing is owed to them or by them. Their
-- rows are locked, so nothing begins meanwhile.
SELECT bool_and(s.status IN ('ready', 'idle', 'failed') AND s.mail_cursor = s.mail_seq AND s.mail_left = '{}'
                AND s.updated_at < now() - make_interval(days => $2::integer))
       AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.session_id = ANY($1))
       AND NOT EXISTS (SELECT 1 FROM continuations c WHERE c.session_id = ANY($1) AND c.state || '' = 'open') AS closed
FROM sessions s WHERE s.id = ANY($1)
