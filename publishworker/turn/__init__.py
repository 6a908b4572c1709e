"""One turn of the relay and its parts: poll, sample, claim, publish, mark, record."""
