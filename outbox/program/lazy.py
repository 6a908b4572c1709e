"""Packages whose names are imported when they are first used. Standard library only."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


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
