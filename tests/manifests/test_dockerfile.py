"""The promises of k8s/Dockerfile, by its text: no test builds an image, because there is no engine."""

import ast
import os
import re
import shlex
import sys
import tomllib
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


def test_stages_build_on_one_pinned_image() -> None:
    """`docker build` without a target makes the worker; wheels are for the Python version that the tests run on."""
    assert list(STAGES) == [
        "build", "runtime", "demo", "pipeline-build", "pipeline", "dataproc-build", "dataproc", "worker",
    ]  # fmt: skip
    [base] = {base for base, _ in STAGES.values()} - STAGES.keys()
    version = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+", base)
    assert version is not None
    assert version[1] == f"{sys.version_info.major}.{sys.version_info.minor}" or not os.environ.get("CI")
    assert f"/opt/pipeline/lib/python{version[1]}/site-packages/pyspark" == variables("pipeline")["SPARK_HOME"]


@pytest.mark.parametrize(
    ("stage", "user", "environment", "entrypoint", "command"),
    [
        ("worker", 65532, "publishworker", ['["publishworker"]'], ['["run"]']),
        ("demo", 65532, "publishworker", ['["python", "-m"]'], ['["orders.demo"]']),
        ("pipeline", 185, "pipeline", ['["/opt/entrypoint.sh"]'], ['["python", "-m", "outbox_pipeline", "--help"]']),
        ("dataproc", 1099, "dataproc", [], []),
    ],
)
def test_an_image_runs_as_a_user_without_root_and_without_tools(
    stage: str, user: int, environment: str, entrypoint: list[str], command: list[str]
) -> None:
    """One environment is copied and pip is removed; exec forms, so that the program receives SIGTERM."""
    assert (instructions(stage, "ENTRYPOINT"), instructions(stage, "CMD")) == (entrypoint, command)
    assert instructions(stage, "USER") == [f"{user}:{user}"]
    build = "build" if environment == "publishworker" else f"{environment}-build"
    copied = instructions(stage, "COPY")
    assert copied[0] == f"--from={build} /opt/{environment} /opt/{environment}"
    assert copied[1:] == {
        "demo": ["docs/examples /opt/examples"],
        "pipeline": ["k8s/spark/entrypoint.sh /opt/entrypoint.sh"],
    }.get(stage, [])
    assert variables(stage)["PATH"] == f"/opt/{environment}/bin:$PATH"
    [run] = instructions(stage, "RUN")
    words = [step.partition(" ")[0] for step in steps(stage)]
    assert words.index("RUN") < words.index("USER")
    assert "python -m pip uninstall --yes --root-user-action=ignore pip setuptools wheel" in run
    if user == 65532:
        assert "apt-get" not in run
    else:  # Hadoop needs a line in passwd; Dataproc mounts Java and Spark
        assert f"--uid {user} " in run
        assert run.endswith(" spark")
        java = "openjdk-17-jre-headless " if stage == "pipeline" else ""
        assert f"apt-get install --yes --no-install-recommends {java}procps tini " in run
        assert "rm -rf /var/lib/apt/lists/*" in run


def test_the_pods_have_the_user_of_the_image() -> None:
    """User and batch of the manifests are numbers of the Dockerfile."""
    for overlay in OVERLAYS.values():
        context = worker(rendered(overlay))["spec"]["template"]["spec"]["securityContext"]
        assert instructions("worker", "USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]


def test_an_environment_has_an_extra_in_pinned_versions_and_no_development_tools() -> None:
    """Only PySpark has no wheel; the worker has no Spark, and Dataproc, which mounts its own, [spark] without it."""
    packages = {"build": '[worker,opentelemetry]"', "pipeline-build": '[spark]"', "dataproc-build": '" datadog'}
    for stage, extra in packages.items():
        *_, tools, install = instructions(stage, "RUN")[-1].split(" && ")
        assert " venv --without-pip " in tools
        assert " install --no-cache-dir --only-binary :all: " in install
        assert f'--constraint constraints.txt "$(ls /opt/wheel/*.whl){extra}' in install
    assert all(
        "constraint constraints.txt" in run for stage in packages for run in instructions(stage, "RUN") if "pip " in run
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    spark = {re.split("[<>=]", each)[0] for each in extras["spark"]}
    assert spark == {*instructions("dataproc-build", "RUN")[-1].rpartition('"')[2].split(), "pyspark"}


def test_every_package_of_the_images_is_in_the_constraints() -> None:
    """A constraint that is missing lets pip take the newest version of a dependency of a dependency."""
    pinned = {canonicalize_name(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().split("\n")}
    found: set[tuple[str, str]] = set()
    left = [("spanner-outbox", extra) for extra in ("", "worker", "opentelemetry", "spark")]
    while left:
        found.add(each := left.pop())
        needed = (Requirement(line) for line in metadata.requires(each[0]) or [])
        for need in (need for need in needed if need.marker is None or need.marker.evaluate({"extra": each[1]})):
            name = canonicalize_name(need.name)
            left += {(name, extra) for extra in ("", *need.extras)} - found
    assert {name for name, _ in found} - pinned == {"spanner-outbox"}
    assert {"pyspark", "grpcio", "numpy"} <= pinned & {name for name, _ in found}


def test_the_ignore_file_allows_only_copied_files() -> None:
    """Each exception to `*` exists and is copied by some stage; the entry point may be executed."""
    ignored = [line for line in (ROOT / "k8s/Dockerfile.dockerignore").read_text().splitlines() if line[0] != "#"]
    assert ignored[0] == "*"
    copies = [line.split()[1:-1] for _, own in STAGES.values() for line in own if re.match("COPY (?!--from)", line)]
    copied = {source for sources in copies for source in sources}
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert os.access(ROOT / "k8s/spark/entrypoint.sh", os.X_OK)


def test_the_demo_image_has_its_imports() -> None:
    """The example and the scripts of the overlay import the worker's packages and themselves."""
    assert variables("demo")["PYTHONPATH"] == "/opt/examples"
    imported = set()
    for file in [*(ROOT / "docs/examples/orders").glob("*.py"), *OVERLAYS["development"].glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.partition(".")[0] for name in names}
    assert imported - set(sys.stdlib_module_names) == {"google", "orders", "outbox", "tqdm"}
