"""Which tasks: a selection and its filters, a list, one task with its message."""
