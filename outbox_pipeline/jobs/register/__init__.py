"""`register`: turns the rows of files or DataFrames into tasks.

In the order of the data: `job` reads the files and sorts the rows, `rows` checks them, `ids` derives the task IDs, and
`executor` inserts the rows in Spark tasks.
"""
