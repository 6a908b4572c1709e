"""Who may do what. Standard library only."""

import dataclasses
import enum
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outbox.base.values import json_value
from outbox.errors import SettingError

_log = logging.getLogger("outbox")


class Role(enum.StrEnum):
    """What a person may do. Each route needs one role."""

    VIEWER = "viewer"  # all pages, without message data
    DATA = "data"  # message data; each view is recorded
    OPERATOR = "operator"  # pause, resume, probe, topic controls, retry
    DESTROYER = "destroyer"  # cancel, purge

    @property
    def flag(self) -> str:
        """Return the flag without which no person holds the role."""
        return "--show-data" if self is Role.DATA else "--allow-actions"


#: The roles that change the outbox.
ACTIONS = (Role.OPERATOR, Role.DESTROYER)
#: The roles that a role includes. Every role includes the viewer.
_INCLUDED = {Role.DESTROYER: ACTIONS}


@dataclasses.dataclass(frozen=True, slots=True)
class Roles:
    """The names of each role, in any case. `*@example.com` is everyone of a domain, `*` everyone with an identity."""

    names: Mapping[Role, tuple[str, ...]]

    def of(self, person: str) -> frozenset[Role]:
        """Return the roles of a person, with those that they include."""
        held = {role for role, patterns in self.names.items() if any(_matches(person, each) for each in patterns)}
        return frozenset(each for role in held for each in (role, Role.VIEWER, *_INCLUDED.get(role, ())))


#: Everyone with an identity may see all pages. `--roles` says more.
VIEWERS = Roles({Role.VIEWER: ("*",)})
#: The person at the loopback address has the credentials of the console anyway.
EVERYTHING = Roles(dict.fromkeys(Role, ("*",)))


def parsed(text: str) -> Roles:
    """Return the roles of a file such as {"viewer": ["*@example.com"]}. Raises SettingError."""
    try:
        return Roles({Role(role): _names(names) for role, names in json_value(text).items()})
    except (ValueError, AttributeError, RecursionError) as error:
        raise SettingError(
            '--roles: the file must be JSON such as {"viewer": ["*@example.com"]}, with the roles '
            f"{', '.join(Role)}: {error}"
        ) from None


class RolesFile:
    """The roles of a file, which is read again when it changes. While it is wrong or missing, the last ones are valid.

    Raises SettingError if the file is wrong at the start.
    """

    def __init__(self, path: str, read: Callable[[], str]) -> None:
        self._path, self._text = path, read
        self._version: object = None
        self._roles = self._read()

    def of(self, person: str) -> frozenset[Role]:
        """Return the roles of a person, with those that they include."""
        try:
            if self._found() != self._version:
                self._roles = self._read()
        except (SettingError, OSError) as error:
            _log.warning("The roles are not read again, and the last ones stay valid: %s", error)
        return self._roles.of(person)

    def _read(self) -> Roles:
        self._version = self._found()  # before the read, so that a change during it is noticed
        return parsed(self._text())

    def _found(self) -> object:
        try:
            found = Path(self._path).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def _names(value: Any) -> tuple[str, ...]:
    if not (isinstance(value, list) and all(isinstance(name, str) and name for name in value)):
        raise ValueError(f"{value!r:.100} is not a list of names")
    return tuple(value)


def _matches(person: str, pattern: str) -> bool:
    person, pattern = person.lower(), pattern.lower()
    return person.endswith(pattern[1:]) if pattern.startswith("*") else person == pattern
