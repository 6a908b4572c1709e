"""The relay's side of Pub/Sub: the publisher, messages and requests, what each error means, spans."""
