-- The tables of this service. `outbox schema apply` creates those of the outbox.
CREATE TABLE Orders (
  OrderId STRING(36) NOT NULL,
  Item STRING(100) NOT NULL,
  Cents INT64 NOT NULL
) PRIMARY KEY (OrderId);

CREATE TABLE Invoices (
  TaskId STRING(64) NOT NULL,
  OrderId STRING(36) NOT NULL,
  Cents INT64 NOT NULL
) PRIMARY KEY (TaskId);
