-- Of the first $2 sessions in the order of their age those that retiring would look at. Ids rise with time.
SELECT count(*) FILTER (WHERE o.parent_id IS NULL AND o.deleted_at IS NULL AND o.status IN ('ready', 'idle', 'failed')
                          AND o.updated_at < now() - make_interval(days => $3)) AS "closed!",
       count(*) AS "looked!"
FROM ((SELECT parent_id, deleted_at, status, updated_at FROM sessions WHERE $1::text IS NULL ORDER BY id LIMIT $2)
      UNION ALL
      (SELECT parent_id, deleted_at, status, updated_at FROM sessions
       WHERE owner = $1 AND deleted_at IS NULL ORDER BY created_at LIMIT $2)) o
