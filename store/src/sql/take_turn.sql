-- Takes the next turn of a bucket, unless that comes later than $5 seconds from now. No honest turn lies further
-- ahead than $6 seconds: what does is of a clock that was set back.
INSERT INTO tool_rates AS r (owner, tool, per_minute, burst, next_at)
VALUES ($1, $2, $3::integer, $4::integer, now() + make_interval(secs => 60::float8 / $3::integer))
ON CONFLICT (owner, tool, per_minute, burst) DO UPDATE
SET next_at = CASE WHEN r.next_at > now() + make_interval(secs => $6 + r.burst * 60::float8 / r.per_minute)
                   THEN now() ELSE greatest(r.next_at, now()) END
              + make_interval(secs => 60::float8 / r.per_minute)
WHERE r.next_at > now() + make_interval(secs => $6 + r.burst * 60::float8 / r.per_minute)
   OR r.next_at <= now() + make_interval(secs => $5 + (r.burst - 1) * 60::float8 / r.per_minute)
RETURNING greatest(extract(epoch FROM r.next_at - now())::float8 - r.burst * 60::float8 / r.per_minute, 0) AS wait
