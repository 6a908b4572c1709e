"""One turn of the relay, and the loop that runs turns."""
