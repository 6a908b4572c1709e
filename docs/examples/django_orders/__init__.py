"""An order service with Django. Each order registers one task in its own transaction."""
