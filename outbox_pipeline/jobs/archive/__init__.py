"""`archive`: writes sent tasks to Parquet, one window at a time, and purges them from the table.

In the order of the data: `job` finds the windows that are due, `transforms` has the rows of the archive, `windows` has
its files and manifests, and `executor` deletes archived tasks in Spark tasks.
"""
