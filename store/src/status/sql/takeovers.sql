-- Runs under way that outlived a worker, those with the most takeovers first, of the first $2 leases.
SELECT h.session_id AS "session!", h.owner AS "owner!", h.agent AS "agent!", h.takeovers AS "takeovers!",
       h.worker AS "worker!", h.created_at AS "since!"
FROM (SELECT session_id, owner, agent, takeovers, worker, created_at FROM runs
      WHERE state = 'claimed' AND ($1::text IS NULL OR owner = $1) ORDER BY session_id LIMIT $2) h
WHERE h.takeovers > 0 ORDER BY h.takeovers DESC, h.created_at LIMIT 10
