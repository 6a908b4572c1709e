"""What every program of the three packages needs: settings, arguments, output, logs, signals, channels."""
