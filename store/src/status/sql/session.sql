SELECT s.owner AS "owner!", s.agent AS "agent!", s.status AS "status!", s.status_detail AS "detail?", s.hold AS "hold!",
       s.version AS "version!", s.turns AS "turns!", s.mail_seq - s.mail_cursor + cardinality(s.mail_left) AS "unread!", s.parent_id AS "parent?",
       s.created_at AS "created_at!", s.updated_at AS "updated_at!", s.deleted_at AS "deleted_at?",
       r.state AS "run_state?", r.mode AS "mode?", r.agent_revision AS "revision?", 
       CASE WHEN isfinite(r.available_at) THEN r.available_at END AS "available_at?", r.worker AS "worker?", r.lease_until AS "lease_until?", r.epoch AS "epoch?",
       r.takeovers AS "takeovers?", r.parked_on AS "parked_on?", r.created_at AS "run_since?",
       (SELECT a.revision FROM agents a WHERE a.slug = s.agent AND a.current) AS "current?"
FROM sessions s LEFT JOIN runs r ON r.session_id = s.id WHERE s.id = $1
