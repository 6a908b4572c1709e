"""The names of Google Cloud, as patterns of regular expressions. Settings, topics and commands use the same ones."""

#: A project ID, also with a domain (example.com:shop), or a number. Emulators accept any ID.
PROJECT = r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,99}"
INSTANCE = r"[a-z][a-z0-9-]{1,63}"
DATABASE = r"[a-z][a-z0-9_-]{1,29}"
#: A topic or subscription ID: https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names
TOPIC_ID = r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}"
#: A topic: its ID, or its full name.
TOPIC = rf"(?:projects/{PROJECT}/topics/)?{TOPIC_ID}"
