"""`archive`: sent tasks go to Parquet, window by window, and may then be purged."""
