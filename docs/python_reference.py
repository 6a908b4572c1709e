"""The reference of the public Python names, from their source: what `generate.py` writes into docs/reference/python."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import griffe
from statements import comment_above

REFERENCE = Path(__file__).parent / "reference"

PYTHON_INTRO = """\
# Python API

<!-- Written by `make docs` from the docstrings. Change those, not this page. -->

These are the public names. The guides show how to use them: [register](../guide/register.md),
[drivers](../guide/drivers.md), [subscribe](../guide/subscribe.md), [test](../guide/testing.md),
[recipes](../guide/recipes.md). [Versions](versions.md) says what else is public."""

#: Of the page of a module.
MODULE_INTRO = """\
# {module}

<!-- Written by `make docs` from the docstrings. Change those, not this page. -->

{about}"""

DBAPI = ("register", "register_once", "register_many", "cancel", "process_once", "run_in_transaction")
#: The public names of each module, in the order of the page.
PYTHON = {
    "outbox": (
        "register", "register_once", "register_many", "cancel", "Task", "Priority", "Message", "TASK_ID_ATTRIBUTE",
        "SupportsInsert", "SupportsReadInsert", "SupportsCancel", "reader", "Reader", "SentTask", "set_metrics",
        "Recorder", "OutboxError", "InvalidMessage", "InvalidTransaction", "InvalidConsumer", "MissingTaskId",
        "PositionExpired",
    ),
    "outbox.inbox": (
        "process_once", "Handler", "BatchHandler", "Receiver", "BatchReceiver", "pushed_message", "ReceivedMessage",
        "PulledMessage", "Handle", "BatchHandle", "Transaction", "Key", "Missing",
    ),
    "outbox.aio": ("register_once", "cancel", "process_once", "run_in_transaction", "AsyncTransaction", "Transaction"),
    "outbox.ext.sqlalchemy": DBAPI,
    "outbox.ext.django": DBAPI,
    "outbox.ext.dbapi": (*DBAPI, "Options"),
    "outbox.testing": (
        "RecordingTransaction", "Mutation", "Statement", "RegisteredTask", "assert_registered",
        "RedeliveringSubscriber",
    ),
    "outbox.testing.faults": ("abort_next_commit", "delay_commits"),
    "publishworker.testing": ("OutboxRelay", "Drained", "Published", "Migrate"),
    "publishworker.hosted": ("HostedRelay",),
    "outbox.table.ddl": ("statements", "tables", "text", "cut"),
    "outbox_pipeline.cli": ("main",),
    "outbox.errors": ("NotReached",),
}  # fmt: skip


def public() -> Iterator[tuple[str, str, griffe.Object]]:
    """Yield module, name and definition of each public name, from the source, without importing it."""
    search = [Path(__file__).parents[1]]
    packages = {name: griffe.load(name, search_paths=search) for name in ("outbox", "publishworker", "outbox_pipeline")}
    for module, names in PYTHON.items():
        package, _, path = module.partition(".")
        for name in names:
            found = packages[package][f"{path}.{name}".removeprefix(".")]
            yield module, name, _source(found)


def _source(found: griffe.Object | griffe.Alias) -> griffe.Object:
    """Return the definition; a class of the Spanner client stays an alias, because its source is not read."""
    try:
        return found.final_target if isinstance(found, griffe.Alias) else found
    except griffe.AliasResolutionError:
        return found  # type: ignore[return-value]  # only its `target_path` is read


def module_page(module: str) -> Path:
    """Return the path of the page of a module."""
    return REFERENCE / "python" / f"{module.replace('.', '-')}.md"


def modules() -> str:
    """Return the page with one line for each module."""
    rows = []
    for module, names in PYTHON.items():
        shown = ", ".join(f"`{name}`" for name in names)
        rows.append((f"[{module}](python/{module_page(module).name})", _about(module), shown))
    return f"{PYTHON_INTRO}\n\n{table(('module', 'about', 'names'), rows)}\n"


def _about(module: str) -> str:
    """Return the first sentence of a module's docstring, without what only a Python shell needs."""
    docstring = ast.get_docstring(ast.parse(_file(module).read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").replace("|", "")


def _file(module: str) -> Path:
    path = Path(__file__).parents[1] / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def page_of(module: str) -> str:
    """Return the page of a module."""
    parts = [MODULE_INTRO.format(module=module, about=_about(module))]
    shown = examples()
    for _, name, found in (each for each in public() if each[0] == module):
        # The module is in each heading, because a search shows headings.
        parts += [f"## {module}.{name}", *_definition(found, module)]
        if (module, name) in shown:
            parts.append(shown[module, name])
    return "\n\n".join(parts) + "\n"


def _definition(found: griffe.Object, module: str) -> Iterator[str]:
    if isinstance(found, griffe.Alias):
        yield f"The class of the Spanner client, for type hints: `{found.target_path}`."
        return
    if isinstance(found, griffe.Function):
        yield from _signature(found, module)
    elif isinstance(found, griffe.Attribute):
        lines = Path(str(found.filepath)).read_text(encoding="utf-8").splitlines()
        yield comment_above(lines, found.lineno or 1)
        yield _code(f"{found.name} = {found.value}")
    yield from _docstring(found)
    if not isinstance(found, griffe.Class):
        return
    methods = [each for each in found.members.values() if isinstance(each, griffe.Function) and each.docstring]
    if not methods and found.attributes:  # a dataclass, an enum or a typed dictionary
        yield _code("\n".join(each.source.strip() for each in found.members.values() if each.is_attribute))
    for method in methods:
        if method.name == "__init__":
            yield from _signature(method, module, name=found.name, return_type=False)
        elif method.name == "__call__" or method.is_public:
            yield from _signature(method, module, name=f"{found.name}.{method.name}")
        else:
            continue
        yield from _docstring(method)


def _signature(function: griffe.Function, module: str, **options: Any) -> Iterator[str]:
    """Yield the signature, and links to the public types in it."""
    text = function.signature(**options)
    yield _code(f"{'async ' if 'async' in function.labels else ''}{text}")
    places = {name: of for of in reversed(PYTHON) for name in PYTHON[of]} | dict.fromkeys(PYTHON[module], module)
    used = sorted({name for name in re.findall(r"\b[A-Z]\w+", text) if name in places})
    links = [f"[{name}]({module_page(places[name]).name}#{_anchor(f'{places[name]}.{name}')})" for name in used]
    if links:
        yield f"Types: {' · '.join(links)}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


#: How the pages call a module. The others they call by its name.
NAMES = {
    "outbox_sqlalchemy": "outbox.ext.sqlalchemy", "outbox_django": "outbox.ext.django", "dbapi": "outbox.ext.dbapi",
    "inbox": "outbox.inbox", "aio": "outbox.aio", "faults": "outbox.testing.faults", "ddl": "outbox.table.ddl",
}  # fmt: skip
#: The modules whose names the pages import.
_BY_NAME = ("outbox.testing", "outbox_pipeline.cli")


def examples() -> dict[tuple[str, str], str]:
    """Return the first use of each public name on the pages, whose code tests run, by module and name."""
    found: dict[tuple[str, str], str] = {}
    guide = sorted((REFERENCE.parent / "guide").glob("*.md"), key=lambda page: page.name != "register.md")
    for page in (*guide, REFERENCE.parent / "operations/pipeline-platforms.md"):
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            prose = re.sub(r"^```.*?^```", "", text[: block.start()], flags=re.MULTILINE | re.DOTALL)
            heading = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)[-1]
            link = f"[{heading}](../../{page.parent.name}/{page.name}#{_anchor(heading)})"
            for module, name, code in _uses(re.sub(r"^%.*", "", block[1], flags=re.MULTILINE)):
                found.setdefault((module, name), f"Example, from {link}:\n\n```python\n{code}\n```")
    return found


def _uses(code: str) -> Iterator[tuple[str, str, str]]:
    """Yield module, name and the function or the statement of each use of a public name."""
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        first = min(statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", [])), 10**9)
        text = "\n".join(code.splitlines()[first - 1 : statement.end_lineno])
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = NAMES.get(node.value.id, node.value.id)
                if node.attr in PYTHON.get(module, ()):
                    yield module, node.attr, text
            elif isinstance(node, ast.Name):
                yield from ((module, node.id, text) for module in _BY_NAME if node.id in PYTHON[module])


def _code(text: str) -> str:
    """Return a block of code, where a long signature has one line for each parameter."""
    if len(text) > 100 and "\n" not in text:
        text = re.sub(r", (?=[*/]|\w+: )", ",\n    ", text.replace("(", "(\n    ", 1))
        text = re.sub(r"\)( -> [^)]*)?$", r",\n)\1", text)
    return f"```text\n{text}\n```"


def _docstring(found: griffe.Object) -> Iterator[str]:
    for section in griffe.parse_google(found.docstring, warnings=False) if found.docstring else ():
        if isinstance(section, griffe.DocstringSectionText):
            yield section.value
        elif isinstance(section, griffe.DocstringSectionParameters):
            yield table(("argument", "meaning"), ((f"`{each.name}`", _line(each)) for each in section.value))
        elif isinstance(section, griffe.DocstringSectionRaises):
            yield table(
                ("raises", "if"), ((f"`{str(each.annotation).strip('()')}`", _line(each)) for each in section.value)
            )
        else:
            raise TypeError(f"{found.path} has a section of the kind {section.kind}: use text, Args and Raises")


def _line(item: griffe.DocstringElement) -> str:
    return " ".join(item.description.split())


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    return "\n".join(_lines(columns, rows))


def _lines(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
