"""`audit`: compares tasks with the messages that a subscription received."""
