"""One module for each job, named as the job, and modules for its parts. The command imports a job by its name."""
