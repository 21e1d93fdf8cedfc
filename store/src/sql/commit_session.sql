-- All members of a group in one statement. Their rows are locked; the version is the fence all the same: if
-- a row is missed, the division ends the transaction.
WITH stored AS (
    UPDATE sessions s
    SET version = s.version + 1, last_commit = n.commit_id, status = n.status, status_detail = n.detail, hold = n.hold,
        turns = n.turns, mail_cursor = n.cursor, mail_left = n.mail_left::bigint[], event_seq = n.event_seq,
        agent_revision = n.revision, updated_at = now()
    FROM UNNEST($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::bigint[],
                $9::text[], $10::bigint[], $11::text[])
         AS n (id, version, commit_id, status, detail, hold, turns, cursor, mail_left, event_seq, revision)
    WHERE s.id = n.id AND s.version = n.version
    RETURNING 1
)
SELECT 1 / (count(*) = cardinality($1))::integer FROM stored
