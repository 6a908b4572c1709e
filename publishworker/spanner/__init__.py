"""The relay's side of Spanner: connection, store, SQL, rows, and what exists only for the emulator."""
