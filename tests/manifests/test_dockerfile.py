"""The image, as far as it can be shown without an engine: what the Dockerfile says, and its steps carried out."""

import ast
import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

import outbox
from tests.manifests.dockerfile import Machine, Step, chain, read
from tests.manifests.rendering import OVERLAYS, ROOT, containers, of_kind, rendered, worker

STAGES = read(ROOT / "k8s" / "Dockerfile")
#: The user of the pods and of the image.
USER = 65532
VENV = "/opt/publishworker"
#: The environments of the pipeline: with PySpark, and where Spark is mounted.
PIPELINE, DATAPROC = "/opt/pipeline", "/opt/dataproc"


def said(stage: str, word: str) -> list[str]:
    """Return what a stage says with an instruction, with the stages that it builds on."""
    return [step.rest for step in chain(STAGES, stage) if step.word == word]


def test_the_worker_is_the_default_and_runs() -> None:
    """`docker build` without a target makes the worker; exec form, so that Python gets SIGTERM; `run` by default."""
    assert list(STAGES) == [
        "build", "runtime", "demo", "pipeline-build", "pipeline", "dataproc-build", "dataproc", "worker",
    ]  # fmt: skip
    assert said("worker", "ENTRYPOINT") == ['["publishworker"]']
    assert said("worker", "CMD") == ['["run"]']
    for stage in ("worker", "demo", "pipeline"):
        assert all(step.rest.startswith("[") for step in chain(STAGES, stage) if step.word in ("ENTRYPOINT", "CMD"))


def test_the_base_image_is_pinned_and_slim() -> None:
    """One exact tag in all stages, of the Python version that the tests run on; wheels are made for it."""
    bases = {stage.base for stage in STAGES.values()} - STAGES.keys()
    [base] = bases
    name, _, tag = base.partition(":")
    assert name == "python"
    version, *variant = tag.split("-")
    assert len(version.split(".")) == 3
    assert variant[0] == "slim"
    assert version.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.") or not os.environ.get("CI")


def test_it_is_not_root_and_the_pods_agree() -> None:
    """Numbers for user and group, the same as in the manifests, and no step after them that needs root."""
    assert said("worker", "USER") == said("demo", "USER") == [f"{USER}:{USER}"]
    steps = list(chain(STAGES, "worker"))
    assert not [step for step in steps[steps.index(Step("USER", f"{USER}:{USER}")) :] if step.word == "RUN"]
    for overlay in OVERLAYS.values():
        context = worker(rendered(overlay))["spec"]["template"]["spec"]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (USER, USER)


def test_the_final_stage_gets_the_environment_and_nothing_else() -> None:
    """No build tools: one folder is copied, nothing is installed, and pip is taken away."""
    assert said("worker", "COPY") == [f"--from=build {VENV} {VENV}"]
    [run] = said("worker", "RUN")
    assert run.startswith("python -m pip uninstall --yes ")
    assert {"pip", "setuptools", "wheel"} <= set(run.split())
    assert [value for value in said("worker", "ENV") if f"PATH={VENV}/bin:$PATH" in value]
    steps = [*STAGES["build"].steps, *chain(STAGES, "worker"), *chain(STAGES, "demo")]
    everything = " ".join(step.rest for step in steps if step.word == "RUN")
    assert not [tool for tool in ("apt-get", "gcc", "build-essential", "curl", "git ") if tool in everything]


def test_the_worker_has_no_spark() -> None:
    """Neither in what its stages do nor in what they take from others: the 490 MB are those of the pipeline's image."""
    steps = [*STAGES["build"].steps, *chain(STAGES, "worker"), *chain(STAGES, "demo")]
    assert not [step for step in steps if step.word == "RUN" and "spark" in step.rest]
    assert not [step for step in steps if PIPELINE in step.rest or DATAPROC in step.rest or "openjdk" in step.rest]


def test_the_pipeline_has_all_of_the_extra() -> None:
    """The wheel with [spark], as driver and executors need it; PySpark alone is not a wheel already."""
    [build] = STAGES["pipeline-build"].all("RUN")
    assert build.rest.endswith('"$(ls /opt/wheel/*.whl)[spark]"')
    assert re.findall(r"--(only|no)-binary (\S+)", build.rest) == [("only", ":all:"), ("no", "pyspark")]
    assert STAGES["pipeline-build"].base == STAGES["dataproc-build"].base == "build"
    assert said("pipeline", "COPY") == [
        f"--from=pipeline-build {PIPELINE} {PIPELINE}",
        "k8s/spark/entrypoint.sh /opt/entrypoint.sh",
    ]
    assert said("pipeline", "ENTRYPOINT") == ['["/opt/entrypoint.sh"]']
    assert os.access(ROOT / "k8s" / "spark" / "entrypoint.sh", os.X_OK)
    version = f"python3.{sys.version_info.minor}"
    [environment] = said("pipeline", "ENV")
    assert f"SPARK_HOME={PIPELINE}/lib/{version}/site-packages/pyspark" in environment.split()
    assert f"PATH={PIPELINE}/bin:$PATH" in environment.split()


def test_the_image_for_dataproc_has_the_rest_of_the_extra() -> None:
    """All of [spark] but PySpark, which is mounted; no Java; the user that is asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {re.split(r"[<>=]", each)[0] for each in project["optional-dependencies"]["spark"]} - {"pyspark"}
    [build] = STAGES["dataproc-build"].all("RUN")
    assert set(build.rest.rpartition('.whl)"')[2].split()) == wanted
    steps = " ".join(step.rest for step in chain(STAGES, "dataproc"))
    assert "openjdk" not in steps
    assert "pyspark" not in steps
    assert {"procps", "tini", "1099"} <= set(steps.split())
    assert said("dataproc", "USER") == ["1099:1099"]
    assert said("dataproc", "ENTRYPOINT") == []


@pytest.mark.parametrize("stage", ["pipeline", "dataproc"])
def test_the_pipelines_images_are_not_root_and_have_no_pip(stage: str) -> None:
    """Numbers for the user, whose line is in passwd; nothing is installed after it; lists of packages are left out."""
    [user] = said(stage, "USER")
    number, _, group = user.partition(":")
    assert number == group
    assert int(number) > 0
    [run] = said(stage, "RUN")
    assert f"--uid {number} " in run
    assert "python -m pip uninstall --yes" in run
    assert "--no-install-recommends" in run
    assert "rm -rf /var/lib/apt/lists/*" in run
    words = [step.word for step in STAGES[stage].steps]
    assert words.index("USER") > words.index("RUN")


def test_every_installation_is_pinned() -> None:
    """Each `pip install` and `pip wheel` is told the versions of constraints.txt."""
    steps = [step for stage in STAGES.values() for step in stage.all("RUN")]
    assert sum(" install " in step.rest and " -m pip " in step.rest for step in steps) >= 4
    for step in steps:
        for part in step.rest.split("&&"):
            if " install " in part and "apt-get" not in part:
                assert "--constraint constraints.txt" in part
            if " pip wheel " in part:
                assert "--build-constraint constraints.txt" in part


def test_the_ignore_file_lets_through_what_is_copied() -> None:
    """And nothing else: it begins with all, and each exception is copied by some stage."""
    first, *lines = [
        line for line in (ROOT / "k8s/Dockerfile.dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    assert first == "*"
    copied = {
        source
        for stage in STAGES.values()
        for step in stage.all("COPY")
        for source in step.values[:-1]
        if not step.rest.startswith("--from")
    }
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)


def test_the_demo_has_what_it_imports() -> None:
    """The example, and the scripts of the overlay, import nothing beyond the worker's packages and themselves."""
    assert "COPY docs/examples /opt/examples" in [f"{step.word} {step.rest}" for step in STAGES["demo"].steps]
    assert said("demo", "ENV")[-1] == "PYTHONPATH=/opt/examples"
    files = [*(ROOT / "docs/examples/orders").glob("*.py"), *OVERLAYS["development"].glob("*.py")]
    imported = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"google", "orders", "outbox", "tqdm"}
    images = {
        each["image"] for kind in of_kind(rendered(OVERLAYS["development"]), "Deployment") for each in containers(kind)
    }
    assert "publishworker-demo:dev" in images


@pytest.mark.timeout(300)
def test_the_steps_make_an_image_that_runs() -> None:
    """Carried out by an unprivileged user in an empty folder; then only what is copied to the final stage is left."""
    # Not pytest's folders: they are closed to other users.
    with tempfile.TemporaryDirectory(prefix="publishworker-image-") as name:
        machine = prepared(Path(name).resolve())
        machine.carry_out(STAGES["build"].steps)
        for folder in ("src", "opt/build", "opt/wheel"):
            shutil.rmtree(machine.root / folder)
        closed = machine.root / "closed"
        closed.mkdir(mode=0o555)
        the_commands_run(machine, closed)
        the_environment_has_no_tools(machine, closed)
        versions_are_those_of_the_constraints(machine, closed)
        nothing_can_be_changed_by_other_users(machine)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("build", "folder"), [("pipeline-build", PIPELINE), ("dataproc-build", DATAPROC)])
def test_the_steps_make_environments_that_run(build: str, folder: str, long: bool) -> None:
    """The pipeline's steps carried out in the same way, for minutes: PySpark is packed on the spot."""
    if not long:
        pytest.skip("installs PySpark from its archive, 490 MB: --long")
    with tempfile.TemporaryDirectory(prefix="outbox-pipeline-image-") as name:
        machine = prepared(Path(name).resolve())
        machine.carry_out([*STAGES["build"].steps, *STAGES[build].steps])
        for other in ("src", "opt/build", "opt/wheel", VENV.lstrip("/")):
            shutil.rmtree(machine.root / other)
        closed = machine.root / "closed"
        closed.mkdir(mode=0o555)
        python = str(machine.inside(f"{folder}/bin/python"))
        for module in ("datadog", "matplotlib", "pandas", "pyarrow", "outbox_pipeline.settings"):
            machine.run([python, "-W", "ignore", "-c", f"import {module}"], closed)
        spark = machine.inside(f"{folder}/lib/python3.{sys.version_info.minor}/site-packages/pyspark")
        assert spark.exists() is (folder == PIPELINE)
        assert bool(list(spark.glob("jars/spark-kubernetes_*.jar"))) is (folder == PIPELINE)
        assert not os.access(spark / "bin" / "spark-submit", os.X_OK) or folder == PIPELINE
        versions_are_those_of_the_constraints(machine, closed, folder)


def prepared(root: Path) -> Machine:
    """Return a file system with nothing but the base image's `python`, which is the one that runs the tests."""
    root.chmod(0o755)
    python = _open_python(root)
    user = USER if os.geteuid() == 0 and _runs(python) else None
    home, tools, opt = root / "home", root / "tools", root / "opt"
    for folder in (home, tools, opt):
        folder.mkdir()
        if user is not None:
            shutil.chown(folder, user, user)
    (tools / "python").symlink_to(python)
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "http"))}
    kept |= {"PIP_CONFIG_FILE": str(_pip_configuration(home))}
    environment = kept | {"HOME": str(home), "PATH": f"{tools}:/usr/bin:/bin", "LANG": "C.UTF-8"}
    return Machine(root, ROOT, environment, user)


def _open_python(root: Path) -> Path:
    """Return the Python that runs the tests, copied to `root` if it is in a folder that is closed to other users."""
    version = f"python3.{sys.version_info.minor}"
    own = Path(sys.base_prefix).resolve()
    if os.geteuid() != 0 or _runs(own / "bin" / version):
        return own / "bin" / version
    copied = root / "base"
    (copied / "bin").mkdir(parents=True)
    shutil.copy(own / "bin" / version, copied / "bin")
    without = shutil.ignore_patterns("site-packages", "test", "__pycache__", "idlelib", "config-*")
    shutil.copytree(own / "lib" / version, copied / "lib" / version, ignore=without)
    return copied / "bin" / version


def _runs(python: Path) -> bool:
    """Tell whether the image's user may run this Python."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [str(python), "-c", "import venv"]
        return subprocess.run(command, user=USER, group=USER, extra_groups=[], check=False, cwd="/").returncode == 0
    return False


def _pip_configuration(home: Path) -> Path:
    """Return a copy of this user's configuration of pip, such as a mirror; it is no part of the image."""
    target = home / "pip.conf"
    for path in (Path("~/.config/pip/pip.conf"), Path("~/.pip/pip.conf")):
        if path.expanduser().is_file():
            target.write_bytes(path.expanduser().read_bytes())
            target.chmod(0o644)
            return target
    target.touch()
    return target


def entry(machine: Machine, *arguments: str) -> list[str]:
    """Return the entry point with arguments."""
    [point] = STAGES["worker"].all("ENTRYPOINT")
    return [str(machine.inside(f"{VENV}/bin/{point.values[0]}")), *arguments]


def the_commands_run(machine: Machine, closed: Path) -> None:
    """As nobody in particular, where nothing can be written: version, probe, and the refusal to run unset."""
    assert machine.run(entry(machine, "--version"), closed) == f"spanner-outbox {outbox.__version__}\n"
    missing = str(machine.root / "heartbeat")
    written = machine.run(entry(machine, "healthcheck", "--heartbeat-file", missing), closed, code=1)
    assert written == f"no heartbeat: {missing}: No such file or directory\n"
    [command] = STAGES["worker"].all("CMD")
    assert "--project is missing" in machine.run(entry(machine, *command.values), closed, code=2)
    assert "CREATE TABLE" in machine.run([str(machine.inside(f"{VENV}/bin/outbox")), "schema", "print"], closed)


def the_environment_has_no_tools(machine: Machine, closed: Path) -> None:
    """Neither pip nor setuptools nor a compiler; the packages of the extra are there, and compiled."""
    python = str(machine.inside(f"{VENV}/bin/python"))
    for module in ("pip", "setuptools", "pytest", "hatchling", "pyspark", "pandas", "pyarrow", "matplotlib"):
        assert "No module named" in machine.run([python, "-c", f"import {module}"], closed, code=1)
    for module in ("datadog", "tqdm", "google.cloud.spanner", "google.cloud.pubsub_v1"):
        machine.run([python, "-W", "ignore", "-c", f"import {module}"], closed)
    programs = {path.name for path in machine.inside(f"{VENV}/bin").iterdir()}
    assert not [name for name in programs if name.startswith(("pip", "gcc", "cc", "wheel", "easy_install"))]
    assert list(machine.inside(VENV).glob("lib/python3*/site-packages/publishworker/__pycache__/*.pyc"))


def versions_are_those_of_the_constraints(machine: Machine, closed: Path, folder: str = VENV) -> None:
    """Every package but ours."""
    names = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    python = str(machine.inside(f"{folder}/bin/python"))
    installed = {_normal(each) for each in machine.run([python, "-c", names], closed).split()}
    pinned = {_normal(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert installed - pinned == {f"spanner-outbox=={outbox.__version__}"}


def _normal(requirement: str) -> str:
    return requirement.lower().replace("_", "-")


def nothing_can_be_changed_by_other_users(machine: Machine) -> None:
    """In the image root owns the files and the worker is another user."""
    open_to_all = [
        path for path in machine.inside(VENV).rglob("*") if not path.is_symlink() and path.stat().st_mode & stat.S_IWOTH
    ]
    assert open_to_all == []
