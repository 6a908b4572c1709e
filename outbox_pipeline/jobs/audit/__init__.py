"""`audit`: compares tasks with the messages that a subscription received.

In the order of the data: `avro` and `received` read the messages, `digests` hashes messages and tasks, `transforms`
judges each task and counts, `effects` compares the records of an inbox, `job` connects these steps, and `page` and
`plots` draw the report.
"""
