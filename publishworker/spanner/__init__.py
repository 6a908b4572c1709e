"""The relay's verbs on Spanner: the store, its statements, its rows."""
