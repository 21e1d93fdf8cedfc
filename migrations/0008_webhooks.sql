-- Endpoints that are sent events, each with its place in the feed across sessions. Their secrets are in no table.
CREATE TABLE webhook_endpoints (
    -- 'server', or 'agent:' and the slug.
    name          text        PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 110),
    -- Whose sessions' events are sent; null means all.
    agent         text,
    url           text        NOT NULL CHECK (length(url) <= 2000),
    -- Which secrets of the schedulers' files sign.
    secret_id     text        NOT NULL CHECK (length(secret_id) BETWEEN 1 AND 100),
    kinds         text[]      NOT NULL CHECK (cardinality(kinds) > 0),
    -- The last event that was looked at.
    feed          uuid        NOT NULL,
    xid           xid8        NOT NULL,
    session_id    uuid        NOT NULL,
    seq           bigint      NOT NULL,
    -- Since when its receiver wants nothing more; and since when it isn't configured any more.
    disabled_at   timestamptz,
    withdrawn_at  timestamptz,
    created_at    timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

-- Events that endpoints are still to be sent, and those that were given up. What was delivered is removed at once.
CREATE TABLE webhook_deliveries (
    session_id  uuid        NOT NULL,
    seq         bigint      NOT NULL,
    endpoint    text        NOT NULL,
    owner       text        NOT NULL,
    agent       text        NOT NULL,
    kind        text        NOT NULL,
    body        text        NOT NULL,
    at          timestamptz NOT NULL,
    state       text        NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'dead')),
    attempts    integer     NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    queued_at   timestamptz NOT NULL DEFAULT now(),
    -- When it is tried next: at once, after a backoff, or when the claim of a scheduler that died is over. Of a
    -- dead one, when it was given up.
    due_at      timestamptz NOT NULL DEFAULT now(),
    claim       uuid,
    -- How the last attempt failed, in Holdfast's words.
    last_error  text        CHECK (length(last_error) <= 200),
    PRIMARY KEY (session_id, endpoint, seq),
    CHECK (state <> 'dead' OR (claim IS NULL AND last_error IS NOT NULL))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 200);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (endpoint, state, due_at);
