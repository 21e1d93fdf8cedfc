-- Who asks says how old a result may be. One that lies ahead is of a clock that was set back.
SELECT result FROM tool_results
WHERE owner = $1 AND key = $2 AND stored_at <= now() AND stored_at > now() - make_interval(secs => $3)
