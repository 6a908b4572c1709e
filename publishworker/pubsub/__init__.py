"""Pub/Sub: from a row to a request, and an outcome for each task."""
