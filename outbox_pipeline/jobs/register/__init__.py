"""`register`: rows of files or DataFrames become tasks."""
