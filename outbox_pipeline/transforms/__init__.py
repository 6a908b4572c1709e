"""From DataFrame to DataFrame: pure, no Spanner, no files."""
