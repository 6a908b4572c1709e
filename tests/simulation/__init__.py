"""Real workers, applications and operators in virtual time, on models of Spanner and Pub/Sub."""
