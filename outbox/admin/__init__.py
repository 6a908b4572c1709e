"""What the operators' commands do with a database. Applications need nothing of it."""
