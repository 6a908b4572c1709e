"""One module a job: what is read, through which transformations, to where, and what is said of it."""
