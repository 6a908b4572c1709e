"""`register`: turns the rows of files or DataFrames into tasks."""
