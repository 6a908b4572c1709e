"""`drain`: Spark tasks relay a backlog beside the workers."""
