"""What the jobs share of Spark: the session, files, pacing, errors."""
