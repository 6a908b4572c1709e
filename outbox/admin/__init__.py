"""Database operations of the operators' commands. Applications do not need this package."""
