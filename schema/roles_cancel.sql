-- Grants of applications that also cancel tasks (outbox.cancel), beyond those of roles.sql. The role then reads messages. It reads the whole table, because a list of columns would lack the shard column that a reshard adds.
GRANT SELECT ON TABLE AsynchronousTasks, AsynchronousTaskShards TO ROLE outbox_application;
GRANT UPDATE(Id, SentAt, CancelledBy, AvailableAt, BlockedBy) ON TABLE AsynchronousTasks TO ROLE outbox_application;
