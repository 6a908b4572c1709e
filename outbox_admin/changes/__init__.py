"""Changes of tasks: retry, resend, purge, cancel and restore."""
