"""Topic controls: pauses, limits, routes and retry policies."""
