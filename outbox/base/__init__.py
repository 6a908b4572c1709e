"""What every other folder uses: values, times, and imports at first use. Standard library only."""
