"""The tables: their DDL, what a database has of them, and the states of a task."""
