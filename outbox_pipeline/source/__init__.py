"""The data source `outbox` of Spark."""
