-- Turns the table of the article into ours, once. Put the name of your own index into the first statement.
DROP INDEX AsynchronousTasksByShard;

-- Shard is computed anew, because tasks of one ordering key must share a shard. A column that a generated column reads
-- cannot be altered, so Id follows the drop.
ALTER TABLE AsynchronousTasks DROP COLUMN Shard;
ALTER TABLE AsynchronousTasks ALTER COLUMN Id STRING(64) NOT NULL;
ALTER TABLE AsynchronousTasks ALTER COLUMN Topic STRING(400) NOT NULL;
ALTER TABLE AsynchronousTasks ALTER COLUMN CreatedAt SET OPTIONS (allow_commit_timestamp = true);
ALTER TABLE AsynchronousTasks ALTER COLUMN SentAt SET OPTIONS (allow_commit_timestamp = true);

-- Rows that exist get NULL, the default or the computed value.
ALTER TABLE AsynchronousTasks ADD COLUMN Bytes INT64 NOT NULL AS (BYTE_LENGTH(Data)) STORED;
ALTER TABLE AsynchronousTasks ADD COLUMN OrderingKey STRING(1024);
ALTER TABLE AsynchronousTasks ADD COLUMN Sequence INT64;
ALTER TABLE AsynchronousTasks ADD COLUMN Shard INT64 NOT NULL
  AS (ABS(MOD(FARM_FINGERPRINT(COALESCE(OrderingKey, Id)), 10))) STORED;
ALTER TABLE AsynchronousTasks ADD COLUMN AvailableAt TIMESTAMP;
ALTER TABLE AsynchronousTasks ADD COLUMN ExpiresAt TIMESTAMP;
ALTER TABLE AsynchronousTasks ADD COLUMN AtMostOnce BOOL NOT NULL DEFAULT (FALSE);
ALTER TABLE AsynchronousTasks ADD COLUMN Attempts INT64 NOT NULL DEFAULT (0);
ALTER TABLE AsynchronousTasks ADD COLUMN LastError STRING(MAX);
ALTER TABLE AsynchronousTasks ADD CONSTRAINT AsynchronousTasksOrderingKey CHECK (OrderingKey != '');

-- This deletes tasks that were sent more than 30 days ago. Leave it out to keep them.
ALTER TABLE AsynchronousTasks ADD ROW DELETION POLICY (OLDER_THAN(SentAt, INTERVAL 30 DAY));

CREATE INDEX AsynchronousTasksToSend
  ON AsynchronousTasks (Shard, SentAt, Topic, AvailableAt, Priority DESC, CreatedAt)
  STORING (OrderingKey, Bytes, Attempts);
CREATE INDEX AsynchronousTasksInOrder
  ON AsynchronousTasks (OrderingKey, Topic, SentAt, CreatedAt, Sequence)
  STORING (AvailableAt)
  WHERE OrderingKey IS NOT NULL;

CREATE TABLE AsynchronousTaskTopics (
  Topic         STRING(400) NOT NULL,
  Paused        BOOL        NOT NULL DEFAULT (FALSE),
  RatePerSecond FLOAT64,
  Burst         INT64,
  MaxInFlight   INT64
) PRIMARY KEY (Topic);
CREATE TABLE AsynchronousTaskWorkers (
  WorkerId  STRING(64) NOT NULL,
  StartedAt TIMESTAMP  NOT NULL,
  SeenAt    TIMESTAMP  NOT NULL OPTIONS (allow_commit_timestamp = true)
) PRIMARY KEY (WorkerId);
CREATE TABLE AsynchronousTaskReplays (
  ReplayId   STRING(64)  NOT NULL,
  StartedAt  TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true),
  FinishedAt TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  Source     STRING(MAX) NOT NULL,
  Predicate  STRING(MAX) NOT NULL,
  Principal  STRING(MAX),
  Tasks      INT64
) PRIMARY KEY (ReplayId);
