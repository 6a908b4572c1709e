"""`replay`: sends sent tasks again, from the table or from the archive."""
