"""The emulators, for development. Applications do not need it."""
