-- Which mail starts a run of an agent's sessions, as its file says. Rows of releases that don't know of it mean
-- the defaults.
ALTER TABLE agents
    ADD COLUMN wake_on text[] NOT NULL DEFAULT '{user,tool,parent,child}'
        CHECK (wake_on <@ '{user,tool,parent,child,peer}'),
    ADD COLUMN resume_on_any_mail boolean NOT NULL DEFAULT false;

-- Events of one session that are passed on to another one's mailbox, until they expire. Each is named by its
-- watcher, so that nobody meets another's names.
CREATE TABLE watches (
    watcher     uuid        NOT NULL,
    id          uuid        NOT NULL,
    watched     uuid        NOT NULL CHECK (watched <> watcher),
    kinds       text[]      NOT NULL CHECK (cardinality(kinds) BETWEEN 1 AND 32),
    tool        text        CHECK (length(tool) <= 200),
    -- The watched session's last event that was looked at.
    cursor      bigint      NOT NULL CHECK (cursor >= 0),
    -- When it was looked at last, or when it may be looked at again: whoever waited longest comes first.
    due_at      timestamptz NOT NULL DEFAULT now(),
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz NOT NULL CHECK (expires_at > created_at),
    PRIMARY KEY (watcher, id)
) WITH (fillfactor = 70);
CREATE INDEX watches_due ON watches (due_at);
