"""The tables of the outbox in Spanner: connection, DDL, states, layouts, transactions."""
