"""`replay`: sent tasks are sent again, from the table or the archive."""
