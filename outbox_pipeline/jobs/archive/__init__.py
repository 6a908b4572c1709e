"""`archive`: writes sent and cancelled tasks to Parquet, one window at a time, and purges the sent ones.

`job` finds the windows that are due, archives and purges them. `windows` has the rows and files, `log` the Delta log.
"""
