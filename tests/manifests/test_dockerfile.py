"""The promises of k8s/Dockerfile, by its text: no test builds an image, because there is no engine."""

import os
import re
import shlex
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.manifests.rendering import OVERLAYS, ROOT, rendered, worker

#: The text without comments, each instruction in one line.
TEXT = re.sub(r"^#.*\n|\\\n\s*", "", (ROOT / "k8s/Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
#: Each stage's base and instructions.
STAGES = {
    name: (base, [line for line in own.splitlines() if line])
    for base, name, own in re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM|\Z)", TEXT, re.MULTILINE | re.DOTALL)
}


def steps(stage: str) -> list[str]:
    base, own = STAGES[stage]
    return [*(steps(base) if base in STAGES else []), *own]


def instructions(stage: str, word: str) -> list[str]:
    return [step.removeprefix(f"{word} ") for step in steps(stage) if step.startswith(f"{word} ")]


def variables(stage: str) -> dict[str, str]:
    pairs = (word.partition("=") for line in instructions(stage, "ENV") for word in shlex.split(line))
    return {name: value for name, _, value in pairs}


def test_stages_build_on_one_image_pinned_by_digest() -> None:
    """`docker build` without a target makes the worker; wheels are for the Python version that the tests run on."""
    assert list(STAGES) == [
        "build", "runtime", "demo", "console-build", "console", "pipeline-build", "pipeline", "dataproc-build",
        "dataproc", "worker",
    ]  # fmt: skip
    [base] = {base for base, _ in STAGES.values()} - STAGES.keys()
    version = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    assert version is not None
    assert version[1] == f"{sys.version_info.major}.{sys.version_info.minor}" or not os.environ.get("CI")
    assert f"/opt/pipeline/lib/python{version[1]}/site-packages/pyspark" == variables("pipeline")["SPARK_HOME"]


@pytest.mark.parametrize(
    ("stage", "user"), [("worker", 65532), ("demo", 65532), ("console", 65532), ("pipeline", 185), ("dataproc", 1099)]
)
def test_an_image_runs_as_a_user_without_root_and_without_pip(stage: str, user: int) -> None:
    """Entry points are exec forms, so that the program receives SIGTERM."""
    assert all(form.startswith('["') for word in ("ENTRYPOINT", "CMD") for form in instructions(stage, word))
    assert instructions(stage, "USER") == [f"{user}:{user}"]
    [run] = instructions(stage, "RUN")
    words = [step.partition(" ")[0] for step in steps(stage)]
    assert words.index("RUN") < words.index("USER")
    assert "pip uninstall --yes --root-user-action=ignore pip setuptools wheel" in run


def test_the_pods_have_the_user_of_the_image() -> None:
    """User and batch of the manifests are numbers of the Dockerfile."""
    for overlay in OVERLAYS.values():
        context = worker(rendered(overlay))["spec"]["template"]["spec"]["securityContext"]
        assert instructions("worker", "USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    assert instructions("console", "USER") == instructions("worker", "USER")


def test_every_package_of_the_images_is_in_the_constraints() -> None:
    """A constraint that is missing lets pip take the newest version of a dependency of a dependency."""
    lines = (ROOT / "constraints.txt").read_text().split("\n")
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    found: set[tuple[str, str]] = set()
    left = [("spanner-outbox", extra) for extra in ("", "worker", "console", "opentelemetry", "spark", "kms")]
    while left:
        found.add(each := left.pop())
        needed = (Requirement(line) for line in metadata.requires(each[0]) or [])
        for need in (need for need in needed if need.marker is None or need.marker.evaluate({"extra": each[1]})):
            name = canonicalize_name(need.name)
            left += {(name, extra) for extra in ("", *need.extras)} - found
    assert {name for name, _ in found} - pinned == {"spanner-outbox"}
    assert {"pyspark", "grpcio", "numpy"} <= pinned & {name for name, _ in found}


@pytest.mark.parametrize("stage", ["build", "pipeline-build", "dataproc-build"])
def test_the_images_have_every_client_of_metrics(stage: str) -> None:
    """`--metrics opentelemetry` is a setting of the worker and of the jobs."""
    assert any("uv pip compile" in run and "--extra opentelemetry " in run for run in instructions(stage, "RUN"))


def test_the_images_install_only_files_with_a_locked_hash() -> None:
    """Except the wheel that the build itself has made."""
    assert {variables("build")[name] for name in ("UV_CONSTRAINT", "UV_BUILD_CONSTRAINT")} == {"/src/constraints.txt"}
    installs = re.findall(r"(?:uv|-m) pip install [^&]+|uv build [^&]+", TEXT.replace("\n", " && "))
    assert len(installs) >= 8
    assert [each for each in installs if "--require-hashes" not in each and "--no-deps /opt/wheel/" not in each] == []


def test_the_ignore_file_allows_only_copied_files() -> None:
    """Each exception to `*` exists and is copied by some stage; the entry point may be executed."""
    ignored = [line for line in (ROOT / "k8s/Dockerfile.dockerignore").read_text().splitlines() if line[0] != "#"]
    assert ignored[0] == "*"
    copies = [line.split()[1:-1] for _, own in STAGES.values() for line in own if re.match("COPY (?!--from)", line)]
    copied = {source for sources in copies for source in sources}
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert os.access(ROOT / "k8s/spark/entrypoint.sh", os.X_OK)
