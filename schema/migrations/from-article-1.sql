-- First step from the table of the article: everything that the old relay does not notice. Run it while the old relay works.
ALTER TABLE AsynchronousTasks ALTER COLUMN Topic STRING(400) NOT NULL;
ALTER TABLE AsynchronousTasks ALTER COLUMN CreatedAt SET OPTIONS (allow_commit_timestamp = true);
ALTER TABLE AsynchronousTasks ALTER COLUMN SentAt SET OPTIONS (allow_commit_timestamp = true);

-- Existing rows get NULL, the default or the computed value.
ALTER TABLE AsynchronousTasks ADD COLUMN Bytes INT64 NOT NULL AS (BYTE_LENGTH(Data)) STORED;
ALTER TABLE AsynchronousTasks ADD COLUMN OrderingKey STRING(1024);
ALTER TABLE AsynchronousTasks ADD COLUMN Sequence INT64;
ALTER TABLE AsynchronousTasks ADD COLUMN AvailableAt TIMESTAMP;
ALTER TABLE AsynchronousTasks ADD COLUMN DueAt TIMESTAMP;
ALTER TABLE AsynchronousTasks ADD COLUMN BlockedBy STRING(64);
ALTER TABLE AsynchronousTasks ADD COLUMN ExpiresAt TIMESTAMP;
ALTER TABLE AsynchronousTasks ADD COLUMN AtMostOnce BOOL NOT NULL DEFAULT (FALSE);
ALTER TABLE AsynchronousTasks ADD COLUMN Attempts INT64 NOT NULL DEFAULT (0);
ALTER TABLE AsynchronousTasks ADD COLUMN LastError STRING(MAX);
ALTER TABLE AsynchronousTasks ADD COLUMN TimesSent INT64 NOT NULL DEFAULT (0);
ALTER TABLE AsynchronousTasks ADD COLUMN CancelledBy STRING(64);
ALTER TABLE AsynchronousTasks ADD CONSTRAINT AsynchronousTasksOrderingKey CHECK (OrderingKey != '');

-- This deletes tasks that were sent more than 7 days ago. Leave it out to keep them.
ALTER TABLE AsynchronousTasks ADD ROW DELETION POLICY (OLDER_THAN(SentAt, INTERVAL 7 DAY));

CREATE TABLE AsynchronousTaskTopics (
  Topic                 STRING(400) NOT NULL,
  Paused                BOOL        NOT NULL DEFAULT (FALSE),
  RatePerSecond         FLOAT64,
  Burst                 INT64,
  MaxInFlight           INT64,
  PublishTo             STRING(400),
  MaxAttempts           INT64,
  BackoffInitialSeconds FLOAT64,
  BackoffMaxSeconds     FLOAT64,
  DeadAfterSeconds      FLOAT64,
  ProbeRequestedAt      TIMESTAMP
) PRIMARY KEY (Topic);

CREATE TABLE AsynchronousTaskWorkers (
  WorkerId               STRING(64) NOT NULL,
  StartedAt              TIMESTAMP  NOT NULL,
  SeenAt                 TIMESTAMP  NOT NULL OPTIONS (allow_commit_timestamp = true),
  LivenessTimeoutSeconds INT64      NOT NULL DEFAULT (14),
  Polls                  STRING(64),
  Info                   JSON
) PRIMARY KEY (WorkerId);

CREATE TABLE AsynchronousTaskShards (
  ColumnName STRING(16) NOT NULL,
  Shards     INT64      NOT NULL,
  State      STRING(16) NOT NULL
) PRIMARY KEY (ColumnName);

CREATE TABLE AsynchronousTaskOperations (
  OperationId STRING(64)  NOT NULL,
  Operation   STRING(32)  NOT NULL,
  StartedAt   TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true),
  FinishedAt  TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  Principal   STRING(MAX),
  Selection   STRING(MAX) NOT NULL,
  Tasks       INT64,
  Reason      STRING(MAX),
  Selected    INT64,
  SeenAt      TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  StoppedAt   TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  Position    STRING(MAX)
) PRIMARY KEY (OperationId);

CREATE TABLE ProcessedTasks (
  Consumer    STRING(256) NOT NULL,
  TaskId      STRING(128) NOT NULL,
  ProcessedAt TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true)
) PRIMARY KEY (Consumer, TaskId),
  ROW DELETION POLICY (OLDER_THAN(ProcessedAt, INTERVAL 32 DAY));
