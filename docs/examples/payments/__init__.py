"""A month's payments through the outbox in bulk, by Spark and by workers, with an audit: see README.md."""
