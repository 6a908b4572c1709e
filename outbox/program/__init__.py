"""Settings, output, logs and channels of all programs."""
