"""The tables of the service."""
