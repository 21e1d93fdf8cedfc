-- Sessions, their turns, calls and mail, the queue of runs, and what clients see of it all.
-- Meanings: docs/ARCHITECTURE.md. Rules for later migrations: migrations/README.md.

-- Epochs are drawn from one sequence and never used again: run rows come and go, fences stay.
CREATE SEQUENCE run_epochs AS bigint;

CREATE TABLE agents (
    slug         text        NOT NULL CHECK (length(slug) BETWEEN 1 AND 100),
    revision     text        NOT NULL CHECK (length(revision) BETWEEN 1 AND 64),
    -- The revision that new runs use: the one that was recorded last.
    current      boolean     NOT NULL,
    source       text        NOT NULL CHECK (source IN ('file', 'database')),
    descriptor   text        NOT NULL,
    recorded_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (slug, revision)
);
CREATE UNIQUE INDEX agents_current ON agents (slug) WHERE current;

CREATE TABLE sessions (
    id              uuid        PRIMARY KEY,
    owner           text        NOT NULL CHECK (length(owner) <= 200),
    agent           text        NOT NULL,
    agent_revision  text        NOT NULL,
    parent_id       uuid,
    parent_call     uuid,
    root_id         uuid        NOT NULL,
    forked_from     uuid,
    status          text        NOT NULL CHECK (status IN ('ready', 'running', 'waiting_external', 'idle', 'paused', 'failed')),
    status_detail   text        CHECK (length(status_detail) <= 4000),
    hold            text        NOT NULL DEFAULT 'none' CHECK (hold IN ('none', 'step', 'paused')),
    version         bigint      NOT NULL DEFAULT 1 CHECK (version >= 1),
    last_commit     uuid,
    turns           bigint      NOT NULL DEFAULT 0 CHECK (turns >= 0),
    mail_seq        bigint      NOT NULL DEFAULT 0,
    mail_cursor     bigint      NOT NULL DEFAULT 0,
    -- Mail at or below the cursor that was considered and waits to be told to the model.
    mail_left       bigint[]    NOT NULL DEFAULT '{}',
    event_seq       bigint      NOT NULL DEFAULT 0,
    settings_rev    bigint      NOT NULL DEFAULT 1,
    priority        smallint    NOT NULL DEFAULT 0 CHECK (priority BETWEEN -100 AND 100),
    labels          text        NOT NULL DEFAULT '{}',
    created_at      timestamptz NOT NULL DEFAULT now(),
    updated_at      timestamptz NOT NULL DEFAULT now(),
    deleted_at      timestamptz,
    CHECK (mail_cursor BETWEEN 0 AND mail_seq),
    CHECK ((parent_id IS NULL) = (root_id = id)),
    CHECK (parent_call IS NULL OR parent_id IS NOT NULL),
    CHECK (status <> 'paused' OR hold = 'paused')
) WITH (fillfactor = 70);
-- Listings go newest first by (updated_at, id); updated_at changes with every commit, so it is in
-- no index: rows stay HOT, and lists are ordered by creation, which is in one.
CREATE INDEX sessions_by_owner ON sessions (owner, created_at DESC, id DESC) WHERE deleted_at IS NULL;
CREATE INDEX sessions_by_parent ON sessions (parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX sessions_deleted ON sessions (deleted_at) WHERE deleted_at IS NOT NULL;

CREATE TABLE turns (
    session_id  uuid        NOT NULL,
    position    bigint      NOT NULL CHECK (position >= 1),
    id          uuid        NOT NULL,
    tag         text        NOT NULL CHECK (tag IN ('UserTurn', 'LlmTurn')),
    format      smallint    NOT NULL,
    body        text        NOT NULL,
    version     bigint      NOT NULL,
    at          timestamptz NOT NULL,
    input_tokens   bigint,
    output_tokens  bigint,
    cached_tokens  bigint,
    PRIMARY KEY (session_id, position),
    CHECK (tag = 'LlmTurn' OR (input_tokens IS NULL AND output_tokens IS NULL AND cached_tokens IS NULL))
);

CREATE TABLE tool_calls (
    session_id   uuid        NOT NULL,
    id           uuid        NOT NULL,
    turn         bigint      NOT NULL,
    index        integer     NOT NULL,
    provider_id  text        NOT NULL,
    name         text        NOT NULL,
    arguments    text        NOT NULL,
    disposition  text        NOT NULL,
    decided_by   text        NOT NULL,
    idempotent   boolean     NOT NULL,
    deadline_seconds bigint,
    state        text        NOT NULL CHECK (state IN ('ready', 'running', 'deferred', 'completed', 'failed', 'cancelled')),
    attempt      integer     NOT NULL,
    token        uuid,
    expires_at   timestamptz,
    created_at   timestamptz NOT NULL,
    started_at   timestamptz,
    settled      text,
    finished_at  timestamptz,
    told         bigint,
    told_result  boolean     NOT NULL DEFAULT false,
    PRIMARY KEY (session_id, id),
    CHECK ((state IN ('completed', 'failed', 'cancelled')) = (settled IS NOT NULL)),
    CHECK ((settled IS NULL) = (finished_at IS NULL)),
    CHECK (state <> 'deferred' OR token IS NOT NULL),
    CHECK (state NOT IN ('running', 'deferred') OR started_at IS NOT NULL),
    CHECK (state <> 'running' OR attempt >= 1),
    CHECK (NOT told_result OR settled IS NOT NULL)
) WITH (fillfactor = 80);
-- What a load needs beside the turns: calls that are open or untold.
CREATE INDEX tool_calls_open ON tool_calls (session_id) WHERE NOT told_result;

CREATE TABLE continuations (
    token        uuid        PRIMARY KEY,
    session_id   uuid        NOT NULL,
    call_id      uuid        NOT NULL,
    owner        text        NOT NULL,
    agent        text        NOT NULL,
    tool         text        NOT NULL,
    reason       text        NOT NULL,
    provider_id  text        NOT NULL,
    arguments    text        NOT NULL,
    state        text        NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'completed', 'failed', 'cancelled', 'expired')),
    created_at   timestamptz NOT NULL,
    expires_at   timestamptz,
    settled_at   timestamptz,
    -- SHA-256 of the result's canonical JSON: tells a client's retry from a rival.
    result_hash  bytea       CHECK (length(result_hash) = 32),
    CHECK ((state = 'open') = (settled_at IS NULL)),
    CHECK ((state IN ('completed', 'failed')) = (result_hash IS NOT NULL))
) WITH (fillfactor = 80);
CREATE INDEX continuations_by_session ON continuations (session_id);
CREATE INDEX continuations_open ON continuations (owner, created_at, token) WHERE state = 'open';
CREATE INDEX continuations_due ON continuations (expires_at) WHERE state = 'open' AND expires_at IS NOT NULL;

CREATE TABLE mail (
    session_id  uuid        NOT NULL,
    seq         bigint      NOT NULL CHECK (seq >= 1),
    id          uuid        NOT NULL,
    sender      text        NOT NULL,
    priority    text        NOT NULL CHECK (priority IN ('normal', 'high')),
    hops        integer     NOT NULL DEFAULT 0 CHECK (hops >= 0),
    tag         text        NOT NULL,
    body        text        NOT NULL,
    wakes       boolean     NOT NULL,
    sent_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (session_id, seq),
    UNIQUE (session_id, id)
);

-- The queue: at most one run a session. A row exists exactly while the engine has something to do.
CREATE TABLE runs (
    session_id      uuid        PRIMARY KEY,
    owner           text        NOT NULL,
    agent           text        NOT NULL,
    agent_revision  text        NOT NULL,
    mode            text        NOT NULL CHECK (mode IN ('none', 'step', 'until_blocked')),
    state           text        NOT NULL CHECK (state IN ('queued', 'claimed', 'parked')),
    priority        smallint    NOT NULL DEFAULT 0,
    available_at    timestamptz NOT NULL DEFAULT now(),
    wake_seq        bigint      NOT NULL DEFAULT 0,
    epoch           bigint      NOT NULL DEFAULT 0,
    worker          uuid,
    lease_until     timestamptz,
    takeovers       integer     NOT NULL DEFAULT 0,
    -- The session's version at the last takeover.
    takeover_version bigint     NOT NULL DEFAULT 0,
    parked_on       text,
    traceparent     text        CHECK (length(traceparent) <= 200),
    created_at      timestamptz NOT NULL DEFAULT now(),
    CHECK ((state = 'claimed') = (worker IS NOT NULL)),
    CHECK ((state = 'claimed') = (lease_until IS NOT NULL)),
    CHECK ((state = 'parked') = (parked_on IS NOT NULL)),
    CHECK (state <> 'claimed' OR epoch > 0)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 200);
-- lease_until is in no index, so that heartbeats stay HOT; parked runs are in none of these.
CREATE INDEX runs_due ON runs (owner, priority DESC, available_at, session_id) WHERE state = 'queued';
CREATE INDEX runs_timers ON runs (available_at) WHERE state = 'parked' AND available_at < 'infinity';
CREATE INDEX runs_claimed ON runs (session_id) WHERE state = 'claimed';

CREATE TABLE blobs (
    owner       text        NOT NULL,
    digest      bytea       NOT NULL CHECK (length(digest) = 32),
    body        text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (owner, digest)
);
ALTER TABLE blobs ALTER COLUMN body SET STORAGE EXTENDED;

-- A session's stream is ordered by seq, dense from 1; the feed across sessions by (xid, session_id,
-- seq) below the snapshot's xmin. Events hold references and are rendered when they are read.
CREATE TABLE events (
    session_id  uuid        NOT NULL,
    seq         bigint      NOT NULL CHECK (seq >= 1),
    owner       text        NOT NULL,
    kind        text        NOT NULL,
    body        text        NOT NULL,
    at          timestamptz NOT NULL DEFAULT now(),
    xid         xid8        NOT NULL DEFAULT pg_current_xact_id()
) PARTITION BY RANGE (at);
CREATE UNIQUE INDEX events_in_session ON events (session_id, seq, at);
CREATE INDEX events_in_feed ON events (xid, session_id, seq) INCLUDE (owner);
CREATE TABLE events_default PARTITION OF events DEFAULT;

-- Which numbering of transactions the feed's positions belong to: a dump that is restored, or a
-- logical upgrade, starts another one.
CREATE TABLE feeds (
    feed               uuid        PRIMARY KEY,
    system_identifier  bigint      NOT NULL,
    timeline_xid       xid8        NOT NULL,
    database           oid         NOT NULL,
    created_at         timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE idempotency_keys (
    principal   text        NOT NULL,
    key         text        NOT NULL CHECK (length(key) BETWEEN 1 AND 200),
    hash        bytea       NOT NULL CHECK (length(hash) = 32),
    code        smallint    NOT NULL,
    resource    text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (principal, key)
);
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);

CREATE TABLE workers (
    id          uuid        PRIMARY KEY,
    host        text        NOT NULL,
    slots       integer     NOT NULL,
    labels      text[]      NOT NULL DEFAULT '{}',
    agents      text[]      NOT NULL DEFAULT '{}',
    held        integer     NOT NULL DEFAULT 0,
    started_at  timestamptz NOT NULL DEFAULT now(),
    seen_at     timestamptz NOT NULL DEFAULT now()
);
