"""Tests of the outbox and of the relay; `tests.support` has what they share."""
