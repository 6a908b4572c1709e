"""Read a Dockerfile, and carry out its steps in a folder, without an engine: absolute paths get that folder in front.

What this cannot show: what the base image has, and that the final stage starts from nothing but it.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: A path of the image in a command: at its beginning or after what cannot be part of a longer path.
_PATH = re.compile(r"(?<![\w./-])/(?=(?:opt|src)\b)")


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction."""

    word: str
    rest: str

    @property
    def values(self) -> list[str]:
        """Return the words of an exec form, or those of a shell's line."""
        words: list[str] = json.loads(self.rest) if self.rest.startswith("[") else shlex.split(self.rest)
        return words


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM and what follows it."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def all(self, word: str) -> list[Step]:
        """Return the steps of one instruction."""
        return [step for step in self.steps if step.word == word]


def read(path: Path) -> dict[str, Stage]:
    """Return the stages by their names, in their order."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    stages: dict[str, Stage] = {}
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.split()
            stages[name] = Stage(base, name)
        else:
            [*_, last] = stages.values()
            last.steps.append(Step(word, rest.strip()))
    return stages


def chain(stages: Mapping[str, Stage], name: str) -> Iterator[Step]:
    """Yield the steps of a stage with those of the stages that it builds on, the earliest first."""
    stage = stages[name]
    if stage.base in stages:
        yield from chain(stages, stage.base)
    yield from stage.steps


@dataclass(frozen=True, slots=True)
class Machine:
    """A folder that plays the file system of an image, and the user whose steps are carried out."""

    root: Path
    context: Path
    environment: Mapping[str, str]
    user: int | None

    def carry_out(self, steps: list[Step]) -> None:
        """Do WORKDIR, COPY from the context and RUN; raise for others and for what fails."""
        folder = self.root
        for step in steps:
            if step.word == "WORKDIR":
                folder = self.inside(step.rest)
                folder.mkdir(parents=True, exist_ok=True)
                self._give(folder)
            elif step.word == "COPY":
                self._copy(step.values, folder)
            elif step.word == "RUN":
                self.run(["sh", "-ec", _PATH.sub(f"{self.root}/", step.rest)], folder)
            else:
                raise ValueError(step)

    def run(self, command: list[str], folder: Path, *, code: int = 0) -> str:
        """Run a command as the user, and return what it writes. Raises AssertionError for another exit code."""
        # No group of ours is left; None keeps all that they are.
        groups: list[int] | None = [] if self.user is not None else None
        done = subprocess.run(
            command,
            cwd=folder,
            env=dict(self.environment),
            user=self.user,
            group=self.user,
            extra_groups=groups,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == code, (command, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def inside(self, path: str) -> Path:
        """Return where an absolute path of the image is."""
        return self.root / path.lstrip("/")

    def _copy(self, words: list[str], folder: Path) -> None:
        *sources, target = words
        for source in sources:
            found = self.context / source
            # A folder's content is copied, a file keeps its name.
            if found.is_dir():
                shutil.copytree(found, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
                copied = folder / target
            else:
                copied = Path(shutil.copy(found, folder / target))
            self._give(copied)

    def _give(self, path: Path) -> None:
        if self.user is not None:
            for each in [path, *path.rglob("*")]:
                shutil.chown(each, self.user, self.user)
