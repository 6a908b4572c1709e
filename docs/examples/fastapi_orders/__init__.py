"""An order service with FastAPI and SQLAlchemy."""
