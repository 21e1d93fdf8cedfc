-- Read after the mail: whatever raised the mode did so together with a letter.
SELECT session_id, mode FROM runs WHERE session_id = ANY($1)
