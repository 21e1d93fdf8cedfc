-- What owners may use; no row means the defaults. The bucket holds the runs that may start now.
CREATE TABLE owner_limits (
    owner            text             PRIMARY KEY CHECK (length(owner) <= 200),
    max_running      integer          CHECK (max_running >= 0),
    runs_per_minute  integer          CHECK (runs_per_minute >= 0),
    max_queued       integer          CHECK (max_queued >= 0),
    bucket           double precision NOT NULL DEFAULT 0 CHECK (bucket >= 0),
    filled_at        timestamptz      NOT NULL DEFAULT now(),
    updated_at       timestamptz      NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

-- Runs that workers hold, by owner. The table holds what is to do now, so the index is made in a moment.
CREATE INDEX runs_held ON runs (owner) WHERE state = 'claimed';
