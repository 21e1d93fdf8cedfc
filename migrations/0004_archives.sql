-- Closed sessions that were retired, each as one document; their rows are gone from the tables of the living.
CREATE TABLE archives (
    session_id   uuid        PRIMARY KEY,
    owner        text        NOT NULL,
    agent        text        NOT NULL,
    parent_id    uuid,
    root_id      uuid        NOT NULL,
    created_at   timestamptz NOT NULL,
    archived_at  timestamptz NOT NULL DEFAULT now(),
    document     text        NOT NULL
);
CREATE INDEX archives_by_owner ON archives (owner, created_at DESC, session_id DESC);
CREATE INDEX archives_by_age ON archives (archived_at);
