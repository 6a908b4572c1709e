"""May a topic be published to now? Topic controls, circuit breakers, rate limits."""
