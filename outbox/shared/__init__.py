"""What both packages and their commands use: settings, logs, times, the metric recorder."""
