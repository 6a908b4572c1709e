-- The tables of the transactional outbox, in GoogleSQL.
-- Apply it with wrench, hammer, gcloud or `outbox schema apply`. Two values are yours to choose: the number of shards (10,
-- in Shard) and how long sent tasks are kept (7 days, at the end of the table). `outbox schema print --shards 32
-- --retention 30 --change-stream` prints the DDL with other choices.
-- No comment here holds a semicolon or a quote, because some tools split a file into statements at these.

-- A task is a request to publish one message. Applications insert it with outbox.register in the transaction that
-- changes their own rows. The state of a task follows from SentAt, CancelledBy, AvailableAt, BlockedBy and Attempts. A
-- task is one row from its registration until the retention or a purge deletes the row.
CREATE TABLE AsynchronousTasks (
  -- A random UUID, or an ID that the caller chose to make the registration idempotent. The primary key begins with it,
  -- so it must never be a monotonically increasing number (hot spot). It travels as the attribute asynchronous_task_id.
  Id          STRING(64)  NOT NULL,
  -- A topic ID in the project of the worker, or projects/PROJECT/topics/TOPIC.
  Topic       STRING(400) NOT NULL,
  -- A serialized google.pubsub.v1.PubsubMessage.
  Data        BYTES(MAX)  NOT NULL,
  -- The size of Data. It is stored in the index, so that a batch is cut by bytes before any message is read.
  Bytes       INT64       NOT NULL AS (BYTE_LENGTH(Data)) STORED,
  -- Higher first. LOW, NORMAL and HIGH are 0, 50 and 100. Any other value is allowed.
  Priority    INT64       NOT NULL,
  -- NULL: unordered. Tasks of one topic and key are published in the order of CreatedAt, Sequence, Id.
  OrderingKey STRING(1024),
  -- A counter of the registering process: the order within one transaction, whose rows share a CreatedAt.
  Sequence    INT64,
  -- Spreads the index over the servers of Spanner, and the work over the workers. All tasks of a key share a shard.
  -- MOD before ABS, because ABS of the smallest INT64 overflows.
  Shard       INT64       NOT NULL AS (ABS(MOD(FARM_FINGERPRINT(COALESCE(OrderingKey, Id)), 10))) STORED,
  -- The commit timestamp of the registering transaction.
  CreatedAt   TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true),
  -- NULL: ready. A future time: scheduled, retrying or deferred. From 9999-12-31T00:00:00Z on: dead, and LastError says
  -- why.
  AvailableAt TIMESTAMP,
  -- When the task should first have been sent. Programs that change AvailableAt later, such as a worker after a failed
  -- attempt, write it, so that the age stays true. NULL: the later of CreatedAt and AvailableAt.
  DueAt       TIMESTAMP,
  -- The ID of the key head behind which this task is deferred. NULL: not deferred.
  BlockedBy   STRING(64),
  -- The task is not published after this time. NULL: it never expires.
  ExpiresAt   TIMESTAMP,
  -- The caller prefers a loss to a duplicate.
  AtMostOnce  BOOL        NOT NULL DEFAULT (FALSE),
  -- Failed attempts that were recorded on this task. 0 again when it is sent.
  Attempts    INT64       NOT NULL DEFAULT (0),
  LastError   STRING(MAX),
  -- How often SentAt was set, and once more for each replay that restored the task from an archive. It tells a task that
  -- an operator wants to be sent again from one whose mark was lost.
  TimesSent   INT64       NOT NULL DEFAULT (0),
  -- When the task was sent or cancelled. NULL: neither. Setting it to NULL sends a sent task again.
  SentAt      TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  -- Who cancelled the task: the ID of an operation, or application. NULL: not cancelled. A cancelled task is published
  -- only if `outbox restore` sets SentAt and CancelledBy to NULL.
  CancelledBy STRING(64),
  -- An unordered task has NULL, never an empty text, which Pub/Sub would take for no key.
  CONSTRAINT AsynchronousTasksOrderingKey CHECK (OrderingKey != '')
) PRIMARY KEY (Id),
  -- OUT-LOSS-7: only sent and cancelled tasks are deleted. A SentAt of NULL never becomes old, so unsent tasks stay, dead
  -- ones included.
  ROW DELETION POLICY (OLDER_THAN(SentAt, INTERVAL 7 DAY));

-- Everything that the poll and the counts by state read, without a join back to the table. For each shard and topic,
-- ready tasks are one range (AvailableAt IS NULL: by priority, then age) and due tasks another. It begins with the
-- shard, not with a timestamp (hot spot).
CREATE INDEX AsynchronousTasksToSend
  ON AsynchronousTasks (Shard, SentAt, Topic, AvailableAt, Priority DESC, CreatedAt)
  STORING (OrderingKey, Bytes, Attempts, BlockedBy, DueAt, CancelledBy);

-- The first unsent tasks of an ordering key. Tasks without a key are not in it, so they do not pay for it. It begins with
-- the shard, because ordering keys often increase monotonically (hot spot).
CREATE INDEX AsynchronousTasksInOrder
  ON AsynchronousTasks (Shard, OrderingKey, Topic, SentAt, CreatedAt, Sequence)
  STORING (AvailableAt, CancelledBy)
  WHERE OrderingKey IS NOT NULL;

-- The cancelled tasks by time. All other tasks are not in it, so they do not pay for it.
CREATE INDEX AsynchronousTasksToRestore
  ON AsynchronousTasks (Shard, SentAt)
  STORING (CancelledBy, Topic, OrderingKey, Sequence, CreatedAt, Bytes)
  WHERE CancelledBy IS NOT NULL;

-- Topic controls: one row for each topic that has a pause, a limit, a route or a retry policy. A limit of NULL is no limit.
-- A rate needs a burst. All live workers share a limit.
CREATE TABLE AsynchronousTaskTopics (
  Topic                 STRING(400) NOT NULL,
  Paused                BOOL        NOT NULL DEFAULT (FALSE),
  RatePerSecond         FLOAT64,
  Burst                 INT64,
  MaxInFlight           INT64,
  -- The Pub/Sub topic that the messages go to instead. NULL: Topic.
  PublishTo             STRING(400),
  -- The retry policy. NULL: the setting of the worker.
  MaxAttempts           INT64,
  BackoffInitialSeconds FLOAT64,
  BackoffMaxSeconds     FLOAT64,
  DeadAfterSeconds      FLOAT64,
  -- When an operator last asked the workers to probe the topic now, if its circuit is open.
  ProbeRequestedAt      TIMESTAMP
) PRIMARY KEY (Topic);

-- Heartbeats: one row for each worker, written every few seconds. The live workers divide the shards among themselves.
CREATE TABLE AsynchronousTaskWorkers (
  WorkerId               STRING(64) NOT NULL,
  StartedAt              TIMESTAMP  NOT NULL,
  SeenAt                 TIMESTAMP  NOT NULL OPTIONS (allow_commit_timestamp = true),
  -- The worker is live until SeenAt is older than this.
  LivenessTimeoutSeconds INT64      NOT NULL DEFAULT (14),
  -- The columns whose shards the worker polls, such as Shard,Shard32. NULL: Shard.
  Polls                  STRING(64),
  -- About the worker: host, version, shards, in-flight batches, open circuits, the settings that differ from their
  -- defaults, and its last hour by minute. No secret, no message, at most 6 kB. NULL: a worker of an older version.
  Info                   JSON
) PRIMARY KEY (WorkerId);

-- Shard columns, since `outbox schema reshard` ran for the first time. No row: workers poll the shards of column Shard.
CREATE TABLE AsynchronousTaskShards (
  -- Shard, or with the number of shards at the end, such as Shard32. The names of its three indexes end with the same number.
  ColumnName STRING(16) NOT NULL,
  Shards     INT64      NOT NULL,
  -- building: the column or an index is not complete. polled: workers poll it. retired: workers stop polling it.
  State      STRING(16) NOT NULL
) PRIMARY KEY (ColumnName);

-- One row for each change that an operator or the pipeline made: who, when, which tasks, and how many. Rows stay. Workers
-- do not need this table.
CREATE TABLE AsynchronousTaskOperations (
  -- A UUID: a random digit, and then the time, so that the last operations are the first of 16 ranges.
  OperationId STRING(64)  NOT NULL,
  -- retry, resend, purge, cancel, restore, stop, continue, view, pause, resume, probe, controls, replay
  -- or reshard.
  Operation   STRING(32)  NOT NULL,
  -- The commit timestamp of the first change.
  StartedAt   TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true),
  -- NULL: it runs, or it ended early.
  FinishedAt  TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  -- The account of the credentials, or the local user and host if the credentials name none.
  Principal   STRING(MAX),
  -- The selection as JSON.
  Selection   STRING(MAX) NOT NULL,
  -- The tasks that were changed, so far or in all. NULL: it is about no task, or not finished.
  Tasks       INT64,
  -- Why, in the words of the person. NULL: no reason was given.
  Reason      STRING(MAX),
  -- The tasks that a dry run counted before the operation began. NULL: there was none.
  Selected    INT64,
  -- The commit timestamp of the last chunk of a retry, resend, purge, cancel or restore. If it is old, no process works
  -- on it.
  SeenAt      TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  -- NULL: no person has stopped the operation.
  StoppedAt   TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  -- Where the next chunk begins, as JSON. Each chunk moves it in its own transaction, so no chunk is executed twice.
  Position    STRING(MAX)
) PRIMARY KEY (OperationId);

-- The inbox of subscribers: the tasks that a consumer has processed. It belongs into the database of the subscriber, and
-- workers do not need it. Keep rows longer than Pub/Sub keeps messages.
CREATE TABLE ProcessedTasks (
  Consumer    STRING(256) NOT NULL,
  TaskId      STRING(128) NOT NULL,
  ProcessedAt TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true)
) PRIMARY KEY (Consumer, TaskId),
  ROW DELETION POLICY (OLDER_THAN(ProcessedAt, INTERVAL 32 DAY));
