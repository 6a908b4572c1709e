-- Second step from the table of the article. Run it after the old relay has stopped, and start the new one afterwards.
DROP INDEX AsynchronousTasksByShardSentAtPriorityCreatedAt;

-- Shard is computed anew, because tasks of one ordering key must share a shard. A column that a generated column reads
-- cannot be altered, so Id follows the drop.
ALTER TABLE AsynchronousTasks DROP COLUMN Shard;
ALTER TABLE AsynchronousTasks ALTER COLUMN Id STRING(64) NOT NULL;
ALTER TABLE AsynchronousTasks ADD COLUMN Shard INT64 NOT NULL
  AS (ABS(MOD(FARM_FINGERPRINT(COALESCE(OrderingKey, Id)), 10))) STORED;

CREATE INDEX AsynchronousTasksToSend
  ON AsynchronousTasks (Shard, SentAt, Topic, AvailableAt, Priority DESC, CreatedAt)
  STORING (OrderingKey, Bytes, Attempts, BlockedBy, DueAt, CancelledBy);

CREATE INDEX AsynchronousTasksInOrder
  ON AsynchronousTasks (Shard, OrderingKey, Topic, SentAt, CreatedAt, Sequence)
  STORING (AvailableAt, CancelledBy)
  WHERE OrderingKey IS NOT NULL;

CREATE INDEX AsynchronousTasksToRestore
  ON AsynchronousTasks (Shard, SentAt)
  STORING (CancelledBy, Topic, OrderingKey, Sequence, CreatedAt, Bytes)
  WHERE CancelledBy IS NOT NULL;
