"""`audit`: compares tasks with the messages that a subscription received.

In the order of the data: `received` reads the messages, `transforms` judges each task and counts, `effects` compares
the records of an inbox, `job` connects these steps, and `page` writes the report.
"""
