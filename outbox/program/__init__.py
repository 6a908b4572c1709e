"""What every program of the three packages needs: settings, arguments, logs, times, channels."""
