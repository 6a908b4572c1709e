"""The licences of all packages that ours installs."""

import importlib.util
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
#: Permissive ones, and the MPL, which asks only for the source of its own files. Ask a lawyer before you add another.
ALLOWED = {
    "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0", "Zlib", "CC0-1.0"
}  # fmt: skip


@pytest.fixture(scope="module")
def licences() -> Any:
    spec = importlib.util.spec_from_file_location("licences_page", ROOT / "docs/licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(licence: str) -> bool:
    """Return whether an expression is not allowed: of each OR, one side must be."""
    parts = re.split(r" AND ", licence)
    return not all({each.strip("() ") for each in part.split(" OR ")} & ALLOWED for part in parts)


def test_each_dependency_has_an_allowed_licence(licences: Any) -> None:
    found = {name: licences.licence(name) for name in licences.dependencies()}
    assert len(found) > 40
    assert {name: licence for name, licence in found.items() if refused(licence)} == {}


@pytest.mark.parametrize("licence", ["GPL-3.0-only", "None", "UNKNOWN", "MIT AND LGPL-2.1-only", "Proprietary"])
def test_an_unknown_licence_is_refused(licence: str) -> None:
    assert refused(licence)
    assert not refused("Apache-2.0 OR GPL-3.0-only")


def test_the_page_is_up_to_date(licences: Any) -> None:
    """With the versions of constraints.txt; those of another environment may have other dependencies."""
    pinned = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    if any(pinned.get(name) != metadata.version(name) for name in licences.dependencies()):
        pytest.skip("other versions than those of constraints.txt are installed")
    assert licences.PAGE.read_text(encoding="utf-8") == licences.page(), "run `make docs`"
