"""`drain`: Spark tasks run workers that send a backlog."""
