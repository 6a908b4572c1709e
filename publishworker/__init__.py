"""The relay: poll, sample, claim, publish, mark, record. Run as `publishworker`.

Nothing is imported here, so that `publishworker healthcheck` stays cheap enough for a probe.
"""
