"""Times and durations as users read them. Pure, standard library only."""

from datetime import UTC, datetime


def shown(time: datetime) -> str:
    """Return a time as RFC 3339, in UTC with Z: what `--since` and `--until` take back."""
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def spoken(seconds: float) -> str:
    """Return a duration for people, in its two largest units: `2d 3h`, `15m 4s`, `0.4s`."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{value}{unit}" for value, unit in ((days, "d"), (hours, "h"), (minutes, "m"), (left, "s"))]
    first = next((place for place, part in enumerate(parts) if not part.startswith("0")), len(parts) - 1)
    return " ".join(part for part in parts[first : first + 2] if not part.startswith("0"))
