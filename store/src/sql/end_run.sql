DELETE FROM runs r USING UNNEST($1::uuid[], $2::bigint[]) AS ended (session_id, epoch)
WHERE r.session_id = ended.session_id AND r.epoch = ended.epoch
