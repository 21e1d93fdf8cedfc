-- Of each of these owners the run that has been due the longest.
SELECT w.owner AS "owner!", r.session_id AS "session!", r.agent AS "agent!", r.agent_revision AS "revision!",
       r.available_at AS "since!", r.takeovers AS "takeovers!",
       (SELECT a.revision FROM agents a WHERE a.slug = r.agent AND a.current) AS "current?"
FROM UNNEST($1::text[]) AS w (owner)
CROSS JOIN LATERAL (
    SELECT d.session_id, d.agent, d.agent_revision, d.available_at, d.takeovers
    FROM runs d WHERE d.owner = w.owner AND d.state = 'queued' AND d.available_at <= now()
    ORDER BY d.available_at LIMIT 1) r
ORDER BY r.available_at
