"""Register, cancel and process tasks in the transactions of SQLAlchemy, Django and DB-API; each module needs one."""
