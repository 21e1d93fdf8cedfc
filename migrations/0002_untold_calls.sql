-- Calls change twice: when they end, and when the model has been told. An index on whether it has been told
-- makes the second change move the row. What a load needs is found by the primary key, among the calls of one
-- session.
DROP INDEX tool_calls_open;
