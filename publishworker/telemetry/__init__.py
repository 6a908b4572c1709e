"""What is told of a worker: the table of metrics, DogStatsD, spans, complaints that do not repeat themselves."""
