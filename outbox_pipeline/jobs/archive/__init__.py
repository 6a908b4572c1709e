"""`archive`: writes sent tasks to Parquet, one window at a time, and purges them from the table.

`job` finds the windows that are due, archives and purges them. `windows` has the rows, files and manifests.
"""
