SELECT seq AS "seq!", kind AS "kind!", at AS "at!" FROM events WHERE session_id = $1 ORDER BY seq DESC LIMIT $2
