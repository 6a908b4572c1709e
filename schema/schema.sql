-- The tables of the transactional outbox. This file is the truth: the files of migrations/ lead to the same result.
-- Plain Spanner DDL (GoogleSQL dialect) for wrench, hammer, gcloud or `outbox schema apply`. Two values are the choice of
-- whoever makes the table: the number of shards (10, in Shard) and how long sent tasks are kept (30 days, at the end of
-- the table). `outbox schema print --shards 32 --retention 7 --change-stream` prints the DDL with other choices.
-- No comment here holds a semicolon or a quote, because some tools cut a file into statements without looking.

-- A task: one message that waits, or has waited, for its topic. Applications insert it with outbox.register in the
-- transaction that changes their own rows. Its state follows from SentAt, AvailableAt and Attempts.
CREATE TABLE AsynchronousTasks (
  -- A random UUID, or a name given by the caller to make the registration idempotent. It leads the primary key, so it
  -- must never be a rising number (hot spot). It travels as the attribute asynchronous_task_id.
  Id          STRING(64)  NOT NULL,
  -- A topic id in the project of the worker, or projects/PROJECT/topics/TOPIC.
  Topic       STRING(400) NOT NULL,
  -- A serialized google.pubsub.v1.PubsubMessage.
  Data        BYTES(MAX)  NOT NULL,
  -- The size of Data, stored in the index so that a group can be cut by bytes before any message is read.
  Bytes       INT64       NOT NULL AS (BYTE_LENGTH(Data)) STORED,
  -- Higher first. LOW, NORMAL and HIGH are 0, 50 and 100, any other value is fine.
  Priority    INT64       NOT NULL,
  -- NULL: no order. Tasks of one topic and key are published in the order of CreatedAt, Sequence, Id.
  OrderingKey STRING(1024),
  -- A counter of the registering process: the order inside one transaction, whose rows share a CreatedAt.
  Sequence    INT64,
  -- Spreads the index over the servers of Spanner and the work over the relays. All tasks of a key share a shard.
  -- MOD before ABS: ABS of the smallest INT64 overflows.
  Shard       INT64       NOT NULL AS (ABS(MOD(FARM_FINGERPRINT(COALESCE(OrderingKey, Id)), 10))) STORED,
  -- The commit timestamp of the registering transaction.
  CreatedAt   TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true),
  -- NULL: ready. A future time: scheduled, backing off, or parked behind the head of its key. From
  -- 9999-12-31T00:00:00Z on: dead, and LastError says why.
  AvailableAt TIMESTAMP,
  -- Not published after this time. NULL: no end.
  ExpiresAt   TIMESTAMP,
  -- The caller prefers a loss to a duplicate.
  AtMostOnce  BOOL        NOT NULL DEFAULT (FALSE),
  -- Failed attempts that were charged to this task. Back to 0 when it is sent.
  Attempts    INT64       NOT NULL DEFAULT (0),
  LastError   STRING(MAX),
  -- NULL: not sent yet. Setting it back to NULL sends the task again.
  SentAt      TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  -- No order is written as NULL, never as an empty text, which Pub/Sub would take for no key.
  CONSTRAINT AsynchronousTasksOrderingKey CHECK (OrderingKey != '')
) PRIMARY KEY (Id),
  -- Only sent tasks are deleted: a SentAt of NULL never becomes old, so unsent and dead tasks stay.
  ROW DELETION POLICY (OLDER_THAN(SentAt, INTERVAL 30 DAY));

-- What the poll reads, without a join back to the table. Per shard and topic the ready tasks are one range (AvailableAt
-- IS NULL: by priority, then age) and the due ones another. It starts with the shard, not with a timestamp (hot spot).
CREATE INDEX AsynchronousTasksToSend
  ON AsynchronousTasks (Shard, SentAt, Topic, AvailableAt, Priority DESC, CreatedAt)
  STORING (OrderingKey, Bytes, Attempts);

-- The first unsent tasks of an ordering key. Tasks without a key are not in it, so they do not pay for it.
CREATE INDEX AsynchronousTasksInOrder
  ON AsynchronousTasks (OrderingKey, Topic, SentAt, CreatedAt, Sequence)
  STORING (AvailableAt)
  WHERE OrderingKey IS NOT NULL;

-- Pauses and limits, one row a topic that has any. NULL: no limit. Rate and burst come together. The limits are those
-- of the whole fleet, each living worker takes its share.
CREATE TABLE AsynchronousTaskTopics (
  Topic         STRING(400) NOT NULL,
  Paused        BOOL        NOT NULL DEFAULT (FALSE),
  RatePerSecond FLOAT64,
  Burst         INT64,
  MaxInFlight   INT64
) PRIMARY KEY (Topic);

-- One row a living worker, written every few seconds: the workers divide the shards among those that they find here.
CREATE TABLE AsynchronousTaskWorkers (
  WorkerId  STRING(64) NOT NULL,
  StartedAt TIMESTAMP  NOT NULL,
  SeenAt    TIMESTAMP  NOT NULL OPTIONS (allow_commit_timestamp = true)
) PRIMARY KEY (WorkerId);

-- One row a replay by the pipeline, kept for ever: who has sent what again, and when. Workers do not need this table.
CREATE TABLE AsynchronousTaskReplays (
  -- A random UUID.
  ReplayId   STRING(64)  NOT NULL,
  -- What was sent before this time is selected, so nothing that the replay sends is selected again.
  StartedAt  TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true),
  -- NULL: it runs, or has ended early and can be resumed.
  FinishedAt TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  -- The word table, or the path of the archive.
  Source     STRING(MAX) NOT NULL,
  -- The selection as JSON, from which a replay is resumed.
  Predicate  STRING(MAX) NOT NULL,
  -- Whose credentials the job had. NULL: not known.
  Principal  STRING(MAX),
  -- How many tasks were selected and found. NULL: not finished.
  Tasks      INT64
) PRIMARY KEY (ReplayId);
