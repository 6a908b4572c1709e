"""Durations and times as users write and read them. Pure, standard library only."""

import re
from datetime import UTC, datetime, timedelta

from outbox.program.settings import SettingType

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
#: A hundred years in seconds: no table is older, and no time before it can be out of range.
_LONGEST = 36_500 * 86_400


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([smhd])", text)
    if not match or (seconds := float(match[1]) * _UNITS[match[2]]) > _LONGEST:
        raise ValueError(text)
    return timedelta(seconds=seconds)


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) else _duration(text).total_seconds()


def _moment(text: str) -> timedelta | datetime:
    if not re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T", text):
        return _duration(text)
    value = datetime.fromisoformat(text)
    # The years at both ends have times that are none in UTC.
    if value.tzinfo is None or not 1 < value.year < 9999:
        raise ValueError(text)
    return value.astimezone(UTC)


#: 90 or 90s, 15m, 2h, 7d: becomes seconds.
SECONDS = SettingType(_seconds, "seconds, or a duration such as 90s, 15m, 2h or 7d")
#: A time, or how long ago it is.
MOMENT = SettingType(
    _moment, "how long ago, such as 90s, 15m, 2h or 7d, or a time with its offset: 2026-11-21T13:00:00Z"
)


def resolved(moment: timedelta | datetime, now: datetime) -> datetime:
    """Return the time that a value of MOMENT means at `now`."""
    return now - moment if isinstance(moment, timedelta) else moment


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
