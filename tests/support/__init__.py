"""What several tests use: one module a subject."""
