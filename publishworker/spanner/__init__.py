"""The relay's side of Spanner: the store, its SQL and errors, the change stream, and the store for the emulator."""
