-- Database roles (fine-grained access control). They are optional, and allow less than roles/spanner.databaseUser, which
-- may read and write everything in the database. With OUTBOX_DATABASE_ROLE=publishworker the worker uses its role.
-- Privileges: https://cloud.google.com/spanner/docs/fgac-privileges
-- The emulator has no roles. A test holds the lists of columns to what the code writes.

-- The relay. It can register nothing, and change neither a message nor where it goes.
CREATE ROLE publishworker;
GRANT SELECT ON TABLE AsynchronousTasks, AsynchronousTaskTopics, AsynchronousTaskWorkers, AsynchronousTaskShards
  TO ROLE publishworker;
GRANT UPDATE(Id, SentAt, CancelledBy, TimesSent, AvailableAt, DueAt, BlockedBy, ExpiresAt, LastError, Attempts)
  ON TABLE AsynchronousTasks TO ROLE publishworker;
GRANT INSERT, UPDATE, DELETE ON TABLE AsynchronousTaskWorkers TO ROLE publishworker;

-- Operators, who run the `outbox` commands.
CREATE ROLE outbox_operator;
GRANT SELECT
  ON TABLE AsynchronousTasks, AsynchronousTaskTopics, AsynchronousTaskWorkers, AsynchronousTaskShards,
    AsynchronousTaskOperations
  TO ROLE outbox_operator;
GRANT UPDATE(Id, SentAt, CancelledBy, AvailableAt, DueAt, BlockedBy, ExpiresAt, Attempts)
  ON TABLE AsynchronousTasks TO ROLE outbox_operator;
GRANT DELETE ON TABLE AsynchronousTasks TO ROLE outbox_operator;
GRANT INSERT, UPDATE, DELETE ON TABLE AsynchronousTaskTopics TO ROLE outbox_operator;
GRANT INSERT, UPDATE ON TABLE AsynchronousTaskOperations TO ROLE outbox_operator;
GRANT INSERT, UPDATE, DELETE ON TABLE AsynchronousTaskShards TO ROLE outbox_operator;

-- People and programs that look: all commands that only read, except `outbox show`. They read no message.
-- During a reshard, grant the column that it adds, such as Shard32, and revoke the old one (docs/operations/upgrade.md).
CREATE ROLE outbox_viewer;
GRANT SELECT(Id, Topic, Bytes, Priority, OrderingKey, Sequence, Shard, CreatedAt, AvailableAt, DueAt, BlockedBy, ExpiresAt,
    AtMostOnce, Attempts, LastError, TimesSent, SentAt, CancelledBy)
  ON TABLE AsynchronousTasks TO ROLE outbox_viewer;
GRANT SELECT
  ON TABLE AsynchronousTaskTopics, AsynchronousTaskWorkers, AsynchronousTaskShards, AsynchronousTaskOperations
  TO ROLE outbox_viewer;

-- Applications. They register tasks, and read no message. If one of them cancels tasks, also run roles_cancel.sql.
CREATE ROLE outbox_application;
GRANT SELECT(Id) ON TABLE AsynchronousTasks TO ROLE outbox_application;
GRANT INSERT(Id, Topic, Data, Priority, OrderingKey, Sequence, CreatedAt, AvailableAt, ExpiresAt, AtMostOnce)
  ON TABLE AsynchronousTasks TO ROLE outbox_application;

-- Subscribers with the inbox. Grant it in their own database, beside the privileges for their own tables.
CREATE ROLE outbox_subscriber;
GRANT SELECT(Consumer, TaskId), INSERT(Consumer, TaskId, ProcessedAt) ON TABLE ProcessedTasks TO ROLE outbox_subscriber;

-- The jobs on Spark: `register` inserts, `archive` and `audit` read tasks, `archive --purge` deletes sent and cancelled
-- ones, `drain` does what the relay does, `replay` updates tasks and inserts those that were purged, and `audit --inbox`
-- reads the records of a subscriber.
CREATE ROLE outbox_pipeline;
GRANT SELECT, DELETE ON TABLE AsynchronousTasks TO ROLE outbox_pipeline;
GRANT UPDATE(Id, SentAt, CancelledBy, TimesSent, AvailableAt, DueAt, BlockedBy, ExpiresAt, LastError, Attempts)
  ON TABLE AsynchronousTasks TO ROLE outbox_pipeline;
GRANT SELECT ON TABLE AsynchronousTaskTopics, AsynchronousTaskWorkers, AsynchronousTaskShards TO ROLE outbox_pipeline;
GRANT INSERT, UPDATE, DELETE ON TABLE AsynchronousTaskWorkers TO ROLE outbox_pipeline;
GRANT INSERT(Id, Topic, Data, Priority, OrderingKey, Sequence, CreatedAt, AvailableAt, DueAt, ExpiresAt, AtMostOnce,
    TimesSent)
  ON TABLE AsynchronousTasks TO ROLE outbox_pipeline;
GRANT SELECT, INSERT, UPDATE ON TABLE AsynchronousTaskOperations TO ROLE outbox_pipeline;
GRANT SELECT(Consumer, TaskId, ProcessedAt) ON TABLE ProcessedTasks TO ROLE outbox_pipeline;
