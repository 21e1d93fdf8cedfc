-- Open deferred calls by what they wait for, of the first $2 in the order of owners.
SELECT g.agent AS "agent!", g.tool AS "tool!", g.reason AS "reason!", count(*) AS "open!",
       count(*) FILTER (WHERE g.expires_at <= now()) AS "overdue!", min(g.created_at) AS "oldest!",
       min(g.expires_at) FILTER (WHERE g.expires_at > now()) AS "next_deadline?"
FROM (SELECT agent, tool, reason, created_at, expires_at FROM continuations
      WHERE state = 'open' AND ($1::text IS NULL OR owner = $1) ORDER BY owner, created_at, token LIMIT $2) g
GROUP BY g.agent, g.tool, g.reason ORDER BY 6 LIMIT $3
