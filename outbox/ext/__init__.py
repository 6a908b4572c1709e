"""Register and process tasks in the transactions of SQLAlchemy, Django and DB-API. Each module needs its driver."""
