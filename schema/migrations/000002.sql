-- What the replays of the pipeline note. Workers need nothing of it. The comments are in ../schema.sql.

CREATE TABLE AsynchronousTaskReplays (
  ReplayId   STRING(64)  NOT NULL,
  StartedAt  TIMESTAMP   NOT NULL OPTIONS (allow_commit_timestamp = true),
  FinishedAt TIMESTAMP   OPTIONS (allow_commit_timestamp = true),
  Source     STRING(MAX) NOT NULL,
  Predicate  STRING(MAX) NOT NULL,
  Principal  STRING(MAX),
  Tasks      INT64
) PRIMARY KEY (ReplayId);
