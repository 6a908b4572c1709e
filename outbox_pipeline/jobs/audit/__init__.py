"""`audit`: tasks are compared with the messages that subscribers received."""
