"""Rows that are registered: what users pass, by which ID, and how a Spark task writes them. Jobs and sinks use it."""
