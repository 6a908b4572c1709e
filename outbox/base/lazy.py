"""Packages whose names are imported when they are first used, and optional packages. Standard library only."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from outbox.errors import OutboxError


def importer(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: the names of each module, or of modules of the package for ""."""
    places = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = places[name]
        found = getattr(import_module(f"{package}.{module}"), name) if module else import_module(f"{package}.{name}")
        setattr(sys.modules[package], name, found)  # later uses of the name do not call this function
        return found

    return find


def need(package: str, user: str, extra: str) -> None:
    """Raise OutboxError, which says what to install, if an optional package is missing."""
    if importlib.util.find_spec(package) is None:
        raise OutboxError(f"{user} needs {package}. Install it: {install(extra)}")


def install(extra: str) -> str:
    """Return how to install an extra."""
    return f"pip install 'spanner-outbox[{extra}]' (before the first release: '/path/to/the/clone[{extra}]')"
