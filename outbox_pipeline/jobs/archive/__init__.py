"""`archive`: writes sent tasks to Parquet, one window at a time, and can purge them from the table."""
