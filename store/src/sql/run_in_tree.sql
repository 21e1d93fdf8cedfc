-- Whether a worker holds a run of these sessions or of an ancestor of the first. The state stands in an
-- expression, lest the server read the index of all claimed runs.
WITH RECURSIVE above AS (
    SELECT id, parent_id FROM sessions WHERE id = $1
    UNION ALL
    SELECT s.id, s.parent_id FROM sessions s JOIN above a ON s.id = a.parent_id
)
SELECT EXISTS (
    SELECT 1 FROM runs
    WHERE session_id = ANY($2::uuid[] || ARRAY(SELECT id FROM above))
      AND state || '' = 'claimed' AND lease_until > now() AND mode <> 'none'
)
