-- What runs in progress are doing. The calls of a round, at most 128, are the newest of their session: ids rise.
WITH held AS MATERIALIZED (
    SELECT session_id, agent FROM runs WHERE state = 'claimed' AND ($1::text IS NULL OR owner = $1) ORDER BY session_id LIMIT $2
), calls AS MATERIALIZED (
    SELECT h.session_id, c.name, c.idempotent, c.started_at
    FROM held h CROSS JOIN LATERAL (
        SELECT t.name, t.idempotent, t.started_at, t.state FROM tool_calls t
        WHERE t.session_id = h.session_id ORDER BY t.id DESC LIMIT 128) c
    WHERE c.state = 'running'
)
SELECT CASE WHEN c.session_id IS NULL THEN 'model_request' WHEN c.idempotent THEN 'tool_again' ELSE 'tool_once' END AS "kind!",
       coalesce(c.name, h.agent) AS "name!", count(DISTINCT h.session_id) AS "runs!",
       min(coalesce(c.started_at, s.updated_at)) AS "since!"
FROM held h JOIN sessions s ON s.id = h.session_id LEFT JOIN calls c ON c.session_id = h.session_id
GROUP BY 1, 2 ORDER BY 1, 3 DESC, 2 LIMIT 200
