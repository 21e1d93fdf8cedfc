-- Since when attempts have failed: a delivery is given up after that, and not for having waited.
ALTER TABLE webhook_deliveries ADD COLUMN failing_since timestamptz;
