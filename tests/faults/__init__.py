"""Faults and load: nothing is lost, and an audit from outside shows it."""
