"""The process: commands, settings, start, signals, health."""
