"""`register`: turns the rows of files or DataFrames into tasks.

In the order of the data: `job` reads the files, `transforms` checks and sorts the rows, `ids` derives the task IDs, and
`executor` inserts the rows in Spark tasks.
"""
