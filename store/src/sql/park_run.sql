UPDATE runs SET state = 'parked', worker = NULL, lease_until = NULL, parked_on = $3, available_at = coalesce($4::timestamptz, 'infinity'::timestamptz)
WHERE session_id = $1 AND epoch = $2
