-- Calls that wait for child sessions, times and mail; what is agreed with the outside about deferred calls; and
-- through which agents a session was called. A release before this one makes no such call and goes on beside it.
ALTER TABLE tool_calls ADD COLUMN waits text, ADD COLUMN read boolean NOT NULL DEFAULT false;
ALTER TABLE tool_calls DROP CONSTRAINT tool_calls_state_check,
    ADD CONSTRAINT tool_calls_state_check
        CHECK (state IN ('ready', 'running', 'waiting', 'deferred', 'completed', 'failed', 'cancelled')) NOT VALID,
    ADD CONSTRAINT tool_calls_waiting_check CHECK (state <> 'waiting' OR (waits IS NOT NULL AND started_at IS NOT NULL)) NOT VALID;
ALTER TABLE continuations ADD COLUMN on_deadline text, ADD COLUMN approval boolean NOT NULL DEFAULT false;
ALTER TABLE continuations DROP CONSTRAINT continuations_state_check,
    ADD CONSTRAINT continuations_state_check
        CHECK (state IN ('open', 'completed', 'failed', 'approved', 'cancelled', 'expired')) NOT VALID;
ALTER TABLE sessions ADD COLUMN call_stack text NOT NULL DEFAULT '';
