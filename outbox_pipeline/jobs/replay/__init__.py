"""`replay`: sends sent tasks again, from the table or from the archive.

In the order of the data: `job` reads the tasks, `transforms` selects and sorts them, and `executor` resets their SentAt
in Spark tasks.
"""
