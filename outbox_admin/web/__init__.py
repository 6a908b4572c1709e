"""The outbox in a browser: what all pages share. The pages are in the folders of their subjects."""
