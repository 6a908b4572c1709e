"""The tables: create them, change the number of shards."""
