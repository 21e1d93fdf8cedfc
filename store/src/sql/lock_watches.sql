-- Watches of an owner begin one after another, so that none closes a circle that another one's beginning hides.
SELECT pg_advisory_xact_lock(7404, hashtext($1))
