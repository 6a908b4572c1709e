-- Database roles (fine-grained access control), for those who want less than roles/spanner.databaseUser, which may read
-- and write everything in the database. Optional: OUTBOX_DATABASE_ROLE=publishworker makes the worker act in its role.
-- Privileges: https://cloud.google.com/spanner/docs/fgac-privileges
-- The emulator has no roles. A test holds the lists of columns to what the code writes.

-- The relay. It can register nothing, and change neither a message nor where it goes.
CREATE ROLE publishworker;
GRANT SELECT ON TABLE AsynchronousTasks, AsynchronousTaskTopics, AsynchronousTaskWorkers TO ROLE publishworker;
GRANT UPDATE(Id, SentAt, AvailableAt, ExpiresAt, LastError, Attempts) ON TABLE AsynchronousTasks TO ROLE publishworker;
GRANT INSERT, UPDATE, DELETE ON TABLE AsynchronousTaskWorkers TO ROLE publishworker;

-- Who runs `outbox status`, `list`, `show`, `retry`, `purge`, `discard`, `topics`, `pause`, `resume` and `limit`.
CREATE ROLE outbox_operator;
GRANT SELECT ON TABLE AsynchronousTasks, AsynchronousTaskTopics, AsynchronousTaskWorkers TO ROLE outbox_operator;
GRANT UPDATE(Id, SentAt, AvailableAt, ExpiresAt, Attempts) ON TABLE AsynchronousTasks TO ROLE outbox_operator;
GRANT DELETE ON TABLE AsynchronousTasks TO ROLE outbox_operator;
GRANT INSERT, UPDATE, DELETE ON TABLE AsynchronousTaskTopics TO ROLE outbox_operator;

-- What an application needs beside its own tables: it registers tasks, and reads no message.
CREATE ROLE outbox_application;
GRANT SELECT(Id) ON TABLE AsynchronousTasks TO ROLE outbox_application;
GRANT INSERT(Id, Topic, Data, Priority, OrderingKey, Sequence, CreatedAt, AvailableAt, ExpiresAt, AtMostOnce)
  ON TABLE AsynchronousTasks TO ROLE outbox_application;

-- The jobs on Spark: `register` inserts, `archive` reads, `archive --purge` deletes, `drain` does what the relay does,
-- `replay` updates, and inserts what was purged.
CREATE ROLE outbox_pipeline;
GRANT SELECT, DELETE ON TABLE AsynchronousTasks TO ROLE outbox_pipeline;
GRANT UPDATE(Id, SentAt, AvailableAt, ExpiresAt, LastError, Attempts) ON TABLE AsynchronousTasks
  TO ROLE outbox_pipeline;
GRANT SELECT ON TABLE AsynchronousTaskTopics, AsynchronousTaskWorkers TO ROLE outbox_pipeline;
GRANT INSERT, UPDATE, DELETE ON TABLE AsynchronousTaskWorkers TO ROLE outbox_pipeline;
GRANT INSERT(Id, Topic, Data, Priority, OrderingKey, Sequence, CreatedAt, AvailableAt, ExpiresAt, AtMostOnce)
  ON TABLE AsynchronousTasks TO ROLE outbox_pipeline;
GRANT SELECT, INSERT, UPDATE ON TABLE AsynchronousTaskReplays TO ROLE outbox_pipeline;
