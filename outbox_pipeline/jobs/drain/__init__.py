"""`drain`: Spark tasks run workers that send a backlog.

`job` starts rounds of workers, and `executor` runs a worker in a Spark task.
"""
