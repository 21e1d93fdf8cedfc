-- Agents that due runs ask for and no live worker has, of the first $2 due runs.
SELECT q.agent AS "agent!", q.agent_revision AS "revision!", q.runs AS "runs!", q.since AS "since!"
FROM (SELECT d.agent, d.agent_revision, count(*) AS runs, min(d.available_at) AS since
      FROM (SELECT agent, agent_revision, available_at FROM runs
            WHERE state = 'queued' AND available_at <= now() AND ($1::text IS NULL OR owner = $1) ORDER BY available_at LIMIT $2) d
      GROUP BY d.agent, d.agent_revision) q
WHERE NOT EXISTS (
    SELECT 1 FROM workers w
    WHERE w.seen_at > now() - interval '1 minute'
      AND (q.agent || '@' || q.agent_revision = ANY(w.agents)
           OR EXISTS (SELECT 1 FROM agents a WHERE a.slug = q.agent AND a.current AND a.slug || '@' || a.revision = ANY(w.agents))))
ORDER BY q.runs DESC, q.agent LIMIT 20
