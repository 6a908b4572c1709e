"""May a topic be published to now? Discovery, circuit breakers, rate limits."""
