"""Write the page of the dependencies' licences, from their installed metadata: `make docs`."""

from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).parent / "reference" / "licences.md"
US = "spanner-outbox"
EXTRAS = metadata.metadata(US).get_all("Provides-Extra") or []
#: Other names of a licence in the metadata of packages, and its identifier: https://spdx.org/licenses/
SPDX = {
    "Apache Software License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
INTRO = """\
# Licences

<!-- Written by `make docs` from the metadata of the packages. `docs/licences.py` has the licences that may be used. -->

The package has the [Apache License 2.0](../../LICENSE). These are the licences of the packages that it installs, with
the versions of `constraints.txt`, as each package declares them. An extra also installs the packages of "always". Spark
includes Java libraries with licences of their own: see the files `licenses` and `NOTICE` of PySpark.

The package contains one file of another project: `outbox_admin/web/static/idiomorph.min.js` is `dist/idiomorph.min.js`
of version 0.8.0 of the npm package [idiomorph](https://github.com/bigskysoftware/idiomorph), with the licence 0BSD.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(Path.cwd())}")


def page() -> str:
    """Return the page."""
    rows = [f"| {name} | {licence(name)} | {', '.join(extras)} |" for name, extras in dependencies().items()]
    return "\n".join([INTRO, "| package | licence | installed by |", "|---|---|---|", *rows]) + "\n"


def dependencies() -> dict[str, list[str]]:
    """Return the names of all packages that ours installs, and the extras that do."""
    found: dict[str, list[str]] = defaultdict(list)
    always = set(_installed_by(""))
    for name in always:
        found[name] = ["always"]
    for extra in EXTRAS:
        for name in set(_installed_by(extra)) - always:
            found[name].append(f"`{extra}`")
    return {name: found[name] for name in sorted(found)}


def _installed_by(extra: str) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    left = [(US, extra)]
    while left:
        name, wanted = left.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        if name != US:
            yield name
        for need in map(Requirement, metadata.requires(name) or []):
            if need.marker is None or need.marker.evaluate({"extra": wanted}):
                left += [(canonicalize_name(need.name), each) for each in ("", *need.extras)]


def licence(name: str) -> str:
    """Return the licence as an SPDX expression, or as the package names it."""
    about: Any = metadata.metadata(name)  # `get`, because Python 3.13 warns if a missing field is read
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [each for each in about.get_all("Classifier") or [] if each.startswith("License :: OSI Approved :: ")]
    names = [each.rpartition(" :: ")[2] for each in classifiers] or [str(about.get("License")).partition("\n")[0]]
    return " AND ".join(dict.fromkeys(SPDX.get(each, each) for each in names))


if __name__ == "__main__":
    main()
