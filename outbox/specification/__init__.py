"""The relay protocol as a state machine, and what compares workers with it: docs/architecture/specification.md."""
