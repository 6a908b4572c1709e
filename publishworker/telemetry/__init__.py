"""Metrics and logs of a worker: the table of metrics, its two clients, the reporter of batches."""
