"""Metrics and logs of a worker: the table of metrics, DogStatsD, the reporter of batches, gauges."""
