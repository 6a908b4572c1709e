"""A standalone Spark cluster on loopback: a master and two workers of pip's PySpark, and an environment to ship.

The Python of the executors has no package, and the workers have none of our variables, so a job that works here has
shipped everything that it needs.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import tarfile
import tempfile
import venv
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pyspark
from packaging.requirements import Requirement

from outbox.devtools import child_process
from outbox.devtools.child_process import LOOPBACK, Child, tied
from tests.support.processes import ROOT, Finished, Process, children, kill_family

SPARK_HOME = Path(pyspark.__file__).parent
#: Java starts in half of the CPU time without its second compiler and with one thread to collect garbage.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: The variables of the master and the workers, which executors inherit.
_BARE = {
    "PATH": os.defpath,
    "SPARK_LOCAL_IP": LOOPBACK,
    "SPARK_DAEMON_MEMORY": "256m",
    "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
} | {name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ}


#: The words of spark-submit that ship the environment, and the main file.
SHIPPED = (
    "--archives", "environment.tar.gz#environment", "--conf", "spark.executorEnv.PYTHONPATH=environment",
    "environment/outbox_pipeline/__main__.py",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A running cluster. `folder` has the workers' own folders, the shipped environment, and Spark's event logs."""

    master: str
    workers: tuple[Child, ...]
    folder: Path

    def spark_tasks(self) -> int:
        """Return how many Spark tasks the last job has run."""
        log = max((self.folder / "events").iterdir(), key=lambda file: file.stat().st_mtime)
        return log.read_text(encoding="utf-8").count('"Event":"SparkListenerTaskEnd"')

    def submit(
        self, *arguments: str, variables: Mapping[str, str], conf: Mapping[str, str] | None = None, seconds: float = 600
    ) -> Finished:
        """Run a job of the package as docs/operations/pipeline-deploy.md says. `variables` go to the executors, too."""
        with self.started(*arguments, variables=variables, conf=conf) as driver:
            return Finished(driver.wait(seconds), driver.stdout, driver.stderr)

    def executors(self) -> list[int]:
        """Return the process IDs of the executors."""
        return [pid for worker in self.workers for pid in children(worker.process.pid)]

    @contextlib.contextmanager
    def started(
        self, *arguments: str, variables: Mapping[str, str], conf: Mapping[str, str] | None = None, file: str = ""
    ) -> Iterator[Process]:
        """Run the driver of a job, or of another `file`, for the time of the block."""
        here = {name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME") if name in os.environ}
        here |= {"SPARK_LOCAL_IP": LOOPBACK, "SPARK_SUBMIT_OPTS": QUICK_JAVA, "PYTHONPATH": "environment"}
        here |= {"PYSPARK_PYTHON": str(self.folder / "bare/bin/python"), "SPARK_LOCAL_DIRS": str(self.folder / "local")}
        options = {f"spark.executorEnv.{name}": value for name, value in variables.items()}
        options |= {
            "spark.executor.memory": "1g",
            "spark.executor.extraJavaOptions": QUICK_JAVA,
            "spark.driver.host": LOOPBACK,
            "spark.ui.enabled": "false",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
            "spark.eventLog.dir": str(self.folder / "events"),
            **(conf or {}),
        }
        words = [str(SPARK_HOME / "bin/spark-submit"), "--master", self.master, *SHIPPED[:-1]]
        for name, value in options.items():
            words += ["--conf", f"{name}={value}"]
        words += [file or SHIPPED[-1], *arguments]
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            child = subprocess.Popen(
                tied(words), env=here | dict(variables), cwd=self.folder, stdout=stdout, stderr=stderr
            )
            try:
                yield Process(child, stdout, stderr)
            finally:
                if child.poll() is None:
                    kill_family(child.pid)
                # A killed process leaves there what it has unpacked.
                shutil.rmtree(self.folder / "local", ignore_errors=True)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Run a master and two workers with one core and 1 GiB each for the time of the block. Then delete the folder."""
    install(folder / "environment")
    with tarfile.open(folder / "environment.tar.gz", "w:gz", compresslevel=0) as archive:
        archive.add(folder / "environment", "")
    venv.create(folder / "bare", with_pip=False)
    (folder / "events").mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        master = stack.enter_context(_daemon("master.Master"))
        url = f"spark://{master.host}"
        flags, local = ("--cores", "1", "--memory", "1g"), str(folder / "local")
        workers = [
            stack.enter_context(
                _daemon("worker.Worker", *flags, "--work-dir", str(folder / name), url, SPARK_LOCAL_DIRS=local)
            )
            for name in ("one", "two")
        ]
        yield Cluster(url, tuple(workers), folder)


def _daemon(name: str, *flags: str, **more: str) -> contextlib.AbstractContextManager[Child]:
    variables = [f"{name}={value}" for name, value in (_BARE | more).items()]
    words = ["/usr/bin/env", "-i", *variables, str(SPARK_HOME / "bin/spark-class"), f"org.apache.spark.deploy.{name}"]
    return child_process.running(
        f"Spark {name}", [*words, "--host", LOOPBACK, "--port", "{port}", "--webui-port", "0", *flags]
    )


def install(folder: Path) -> None:
    """Install what `pip install --target FOLDER 'spanner-outbox[cluster]'` does, as links to the packages of the tests.

    Without pip, because tests download nothing. As links to whole packages, because each job copies and unpacks several
    times what is shipped: with files, 5 GB.
    """
    folder.mkdir(parents=True)
    for name in ("outbox", "publishworker", "outbox_admin", "outbox_pipeline", "pyspark_outbox"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copytree(ROOT / "schema", folder / "outbox/ddl", dirs_exist_ok=True)
    for package in _needed("spanner-outbox", frozenset({"cluster"}), {}):
        site = Path(str(package.locate_file("")))
        for path in {_whole(site, Path(str(file))) for file in package.files or () if ".." not in file.parts}:
            if not os.path.lexists(folder / path):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).symlink_to(site / path)


def _whole(site: Path, file: Path) -> Path:
    """Return the outermost folder of a file that belongs to one distribution, or the file."""
    folders = [*file.parents][-2::-1]
    return next((each for each in folders if each.suffix or (site / each / "__init__.py").exists()), file)


def _needed(name: str, extras: frozenset[str], found: dict[str, Distribution]) -> list[Distribution]:
    """Return the installed packages that a package with these extras needs."""
    for line in distribution(name).requires or ():
        need = Requirement(line)
        if need.name in found or not any(
            need.marker is None or need.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            continue
        found[need.name] = distribution(need.name)
        _needed(need.name, frozenset(need.extras), found)
    return list(found.values())
