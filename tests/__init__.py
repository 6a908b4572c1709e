"""Tests of the outbox and of the relay; they share `tests.support`."""
