"""The daily certificate: a signed document about one closed window, which `audit --certificate` writes.

`document` is its form, `merkle` the tree over its tasks, `keys` signs and verifies, and `commands` has `certificate
verify` and `prove`, which read copies of the archive and of received files. None of these needs Spark.
"""
