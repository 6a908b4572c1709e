"""The delivery of one batch: claim, publish, mark."""
