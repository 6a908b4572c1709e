-- The first version: 10 shards, sent tasks kept for 7 days. The comments are in ../schema.sql.

CREATE TABLE AsynchronousTasks (
  Id          STRING(64)  NOT NULL,
  Topic       STRING(400) NOT NULL,
  Data        BYTES(MAX)  NOT NULL,
  Bytes       INT64       NOT NULL AS (BYTE_LENGTH(Data)) STORED,
  Priority    INT64       NOT NULL,
  OrderingKey STRING(1024),
  Sequence    INT64,
  Shard       INT64       NOT NULL AS (ABS(MOD(FARM_FINGERPRINT(COALESCE(OrderingKey, Id)), 10))) STORED,
  CreatedAt   TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true),
  AvailableAt TIMESTAMP,
  BlockedBy   STRING(64),
  ExpiresAt   TIMESTAMP,
  AtMostOnce  BOOL        NOT NULL DEFAULT (FALSE),
  Attempts    INT64       NOT NULL DEFAULT (0),
  LastError   STRING(MAX),
  TimesSent   INT64       NOT NULL DEFAULT (0),
  SentAt      TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  CONSTRAINT AsynchronousTasksOrderingKey CHECK (OrderingKey != '')
) PRIMARY KEY (Id),
  ROW DELETION POLICY (OLDER_THAN(SentAt, INTERVAL 7 DAY));

CREATE INDEX AsynchronousTasksToSend
  ON AsynchronousTasks (Shard, SentAt, Topic, AvailableAt, Priority DESC, CreatedAt)
  STORING (OrderingKey, Bytes, Attempts, BlockedBy);

CREATE INDEX AsynchronousTasksInOrder
  ON AsynchronousTasks (Shard, OrderingKey, Topic, SentAt, CreatedAt, Sequence)
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
  WorkerId               STRING(64) NOT NULL,
  StartedAt              TIMESTAMP  NOT NULL,
  SeenAt                 TIMESTAMP  NOT NULL OPTIONS (allow_commit_timestamp = true),
  LivenessTimeoutSeconds INT64      NOT NULL DEFAULT (14),
  Polls                  STRING(64)
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
  Tasks       INT64
) PRIMARY KEY (OperationId);

CREATE TABLE ProcessedTasks (
  Consumer    STRING(256) NOT NULL,
  TaskId      STRING(128) NOT NULL,
  ProcessedAt TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true)
) PRIMARY KEY (Consumer, TaskId),
  ROW DELETION POLICY (OLDER_THAN(ProcessedAt, INTERVAL 32 DAY));
