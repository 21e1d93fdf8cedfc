-- What wrappers of tool calls remember for all workers: results of calls, and how fast calls may begin.

-- The key is a SHA-256 of the tool and its arguments.
CREATE TABLE tool_results (
    owner       text        NOT NULL CHECK (length(owner) <= 200),
    key         bytea       NOT NULL CHECK (octet_length(key) = 32),
    result      text        NOT NULL CHECK (octet_length(result) <= 262144),
    stored_at   timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz NOT NULL CHECK (expires_at > stored_at),
    PRIMARY KEY (owner, key)
);
CREATE INDEX tool_results_by_age ON tool_results (expires_at);

-- The next call of a bucket may begin `burst` calls' worth of time before `next_at`. A row whose time has come
-- says as much as none. No index: the time changes with every call.
CREATE TABLE tool_rates (
    owner       text        NOT NULL CHECK (length(owner) <= 200),
    tool        text        NOT NULL CHECK (length(tool) BETWEEN 1 AND 64),
    per_minute  integer     NOT NULL CHECK (per_minute >= 1),
    burst       integer     NOT NULL CHECK (burst >= 1),
    next_at     timestamptz NOT NULL,
    PRIMARY KEY (owner, tool, per_minute, burst)
) WITH (fillfactor = 50);
