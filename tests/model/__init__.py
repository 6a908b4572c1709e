"""The protocol as a small transition system, explored in full."""
