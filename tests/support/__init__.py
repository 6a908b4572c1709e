"""Modules that several tests share, one for each subject."""
