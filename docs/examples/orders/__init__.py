"""An order service with an outbox, a subscriber, and a demonstration of both: see README.md."""
