-- Read after the mail: whatever raised the mode did so together with a letter.
SELECT mode FROM runs WHERE session_id = $1
