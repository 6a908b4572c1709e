"""The relay: poll, resolve ordering keys, select, claim, publish, mark, report. Run as `publishworker`.

Nothing is imported here, so that `publishworker healthcheck` stays cheap enough for a probe.
"""
