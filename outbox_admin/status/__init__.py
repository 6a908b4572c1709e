"""What waits, and why: problems, the last hour, workers."""
