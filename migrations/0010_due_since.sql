-- Due runs by when they became due, so that a look begins where the last one ended and passes over no entries of what
-- was claimed before, which stay dead in the index for as long as anybody holds an old snapshot. Not built concurrently,
-- which waits for such snapshots too: reading a million parked runs takes less than a second.
CREATE INDEX runs_due_since ON runs (available_at) WHERE state = 'queued';
