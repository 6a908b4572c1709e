"""A shell carries out the pages that deploy; its tools only record their arguments, which their parsers then accept."""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import outbox_admin.cli
import publishworker.process.cli
from outbox import __version__
from outbox.errors import SettingError
from outbox_pipeline import cli
from tests.manifests.rendering import GOLDEN, K8S, OVERLAYS, ROOT, check_golden, composed, kubectl, programs, rendered
from tests.support.cluster import SHIPPED

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
    """`docker build` without a target makes the worker; the tests have run on its Python version."""
    assert list(STAGES) == [
        "build", "runtime", "demo", "console-build", "console", "pipeline-build", "pipeline", "dataproc-build",
        "dataproc", "worker",
    ]  # fmt: skip
    [base] = {base for base, _ in STAGES.values()} - STAGES.keys()
    version = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    assert version is not None
    assert f"| pinned-{version[1]} |" in (ROOT / "docs/reference/versions.md").read_text(encoding="utf-8")
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
    for overlay in OVERLAYS:
        context = rendered(overlay).template()["spec"]["securityContext"]
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


WORKER, PIPELINE = "docs/operations/deploy.md", "docs/operations/pipeline-deploy.md"
CLOUD_RUN = "docs/operations/cloud-run.md"
PLATFORMS = "docs/operations/pipeline-platforms.md"
PAGES = (WORKER, PIPELINE, PLATFORMS, CLOUD_RUN, "k8s/README.md")
PARSERS = {"outbox": outbox_admin.cli._parser, "publishworker": publishworker.process.cli._parser}
PIPS = ("pip", "packing/bin/pip")
PYTHONS = ("python", "python3")
TOOLS = ("gcloud", "kubectl", "docker", "helm", *PIPS, "tar", *PYTHONS, "outbox-pipeline", "spark-submit", *PARSERS)
#: The answers of the registry and the project.
REGISTRY, NUMBER = "registry.example/my-project/outbox", "123456789012"
#: The messages of gcloud and kubectl for a parsed command line that they cannot send.
PARSED = re.compile("You do not currently have an active account selected|127.0.0.1:9")
#: Not asked: the first waits for a browser, the others need a cluster before they parse all.
UNASKED = re.compile("gcloud auth .*login|kubectl diff|kubectl config")
#: Those with which the worker has its database role only, instead of a row of the table.
NARROW = {"roles/spanner.fineGrainedAccessUser", "roles/spanner.databaseRoleUser"}
BATCH = ("gcloud", "dataproc", "batches", "submit", "pyspark")

Words = tuple[str, ...]


def carried_out(text: str, folder: Path) -> list[Words]:
    """Run the commands behind a page's prompts in a copy of k8s, and return the words of each call of a tool."""
    shutil.copytree(K8S, folder / "k8s")
    record = folder / "record"
    # One write for each call, because both ends of a pipe run at once.
    stub = f"""() {{ printf '%s\\0' $FUNCNAME "$@" $'\\x1e' >>{record}; answer "$*"; }}"""
    answer = f"""answer() {{ case "$1" in *registryUri*) echo {REGISTRY};; *projectNumber*) echo {NUMBER};; esac; }}"""
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)", "\n".join(blocks), re.MULTILINE)
    lines = ["set -eu", answer, *(tool + stub for tool in TOOLS), "export DD_API_KEY=api DD_APP_KEY=app", *commands]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [tuple(call.split("\0")[:-1]) for call in record.read_text().split("\x1e\0")[:-1]]


@functools.cache
def calls(page: str, *start: str) -> list[Words]:
    if start:
        return [words for words in calls(page) if words[: len(start)] == start]
    with tempfile.TemporaryDirectory() as folder:
        return carried_out((ROOT / page).read_text(encoding="utf-8"), Path(folder))


def values(words: Words, name: str) -> list[str]:
    after = [value for word, value in itertools.pairwise(words) if word == name]
    return after + [word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}=")]


def refusal(line: str, home: Path) -> str:
    """Return why gcloud or kubectl refuses a command line before it calls anything, or nothing."""
    tool, *words = shlex.split(line)
    if tool == "kubectl":
        closed = ["--kubeconfig=/dev/null", "--server=https://127.0.0.1:9", "--token=none"]
        tool, words = kubectl(), [*closed, *words]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CLOUDSDK_CONFIG": str(home / "gcloud"),
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_PROJECT": "my-project",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        # Nothing listens there.
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [tool, *words],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return "" if done.returncode == 0 or PARSED.search(done.stderr) else f"{line}: {done.stderr[:500]}"


@pytest.mark.timeout(300)
def test_gcloud_and_kubectl_accept_every_command_line(tmp_path: Path, long: bool) -> None:
    """Their own parsers, without an account or a cluster; with --long also those that the golden file has."""
    every = {shlex.join(words) for page in PAGES for tool in ("gcloud", "kubectl") for words in calls(page, tool)}
    file = GOLDEN / "command-lines.txt"
    known = set(file.read_text(encoding="utf-8").splitlines()) if file.exists() and not long else set()
    asked = sorted(line for line in every - known if not UNASKED.match(line))
    if asked:
        programs("gcloud")
    assert [refused for line in asked if (refused := refusal(line, tmp_path))] == []
    check_golden(file.name, "".join(f"{line}\n" for line in sorted(every)))


def test_our_own_commands_parse() -> None:
    """Those of the page, also inside of a pod, and those of its checklist, where each line has one or a page."""
    ours = [words for name in PARSERS for page in (WORKER, CLOUD_RUN) for words in calls(page, name)]
    ours += [words[words.index("--") + 1 :] for words in calls(WORKER, "kubectl") if "--" in words]
    text = (ROOT / WORKER).read_text(encoding="utf-8").partition("\n## Before production\n")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| requirement |")]
    assert len(rows) > 10
    assert [row for row in rows if "`" not in row and "](" not in row] == []
    for command in re.findall(r"`((?:outbox|publishworker|kubectl) [^`]+)`", text):
        words = tuple(command.replace("TOPIC ...", "TOPIC").split())
        if words[0] != "kubectl":
            ours.append(words)
        else:
            assert words[1:3] == ("--namespace", "outbox")
            assert "deployment/" not in command or command.endswith("deployment/publishworker")
    assert {words[0] for words in ours} == set(PARSERS)
    for words in ours:
        PARSERS[words[0]]().parse_args(words[1:])


@pytest.mark.parametrize(
    ("page", "folder", "image"),
    [(WORKER, "overlays/production", "publishworker:0.2.0"), (PIPELINE, "spark", "outbox-pipeline:0.1.0")],
)
def test_only_the_values_that_a_page_sets_change(page: str, folder: str, image: str, tmp_path: Path) -> None:
    """With other names than the placeholders, the folder has these names, and no other change."""
    text = (ROOT / page).read_text(encoding="utf-8")
    name, _, version = image.partition(":")
    defaults = "export PROJECT=my-project REGION=europe-west1 INSTANCE=main DATABASE=shop ENV=production"
    assert defaults in text
    text = text.replace(defaults, "export PROJECT=acme REGION=europe-west1 INSTANCE=big DATABASE=books ENV=staging", 1)
    carried_out(text.replace("BUCKET=my-bucket", "BUCKET=acme-archive", 1), tmp_path)
    expected = rendered(folder).text
    role = "\n  OUTBOX_DATABASE_ROLE: publishworker" if page == WORKER else ""
    for old, new in {
        f"my-project/outbox/{name}": f"{REGISTRY}/{name}",
        "0.0.0-placeholder": version,
        "OUTBOX_PROJECT: my-project": "OUTBOX_PROJECT: acme",
        "OUTBOX_INSTANCE: main": "OUTBOX_INSTANCE: big",
        "OUTBOX_DATABASE: shop": f"OUTBOX_DATABASE: books{role}",
        "env: production": "env: staging",
    }.items():
        assert old in expected
        expected = expected.replace(old, new)
    expected = expected.replace("{env:production,", "{env:staging,").replace("gs://my-bucket", "gs://acme-archive")
    found = rendered(tmp_path / "k8s" / folder).text
    # The hash of the settings in the ConfigMap's name differs.
    found, expected = (re.sub(r"publishworker-[a-z\d]{10}\b", "HASH", text) for text in (found, expected))
    assert found == expected
    assert "CREATE ROLE publishworker;" in (ROOT / "schema/roles.sql").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "folder"), [(WORKER, "overlays/production"), (PIPELINE, "spark")])
def test_roles_are_granted_to_the_account_of_the_manifests(page: str, folder: str) -> None:
    """The account has the roles of the page's table, and none on the project."""
    objects = rendered(folder)
    names = objects.the("ServiceAccount")["metadata"]
    namespace, account = names["namespace"], names["name"]
    pool = f"//iam.googleapis.com/projects/{NUMBER}/locations/global/workloadIdentityPools/my-project.svc.id.goog"
    principal = f"principal:{pool}/subject/ns/{namespace}/sa/{account}"
    granted = [words for words in calls(page, "gcloud") if values(words, "--member") == [principal]]
    assert "projects" not in {words[1] for words in granted}
    roles = {role for words in granted for role in values(words, "--role")}
    page_lists = set(re.findall(r"^\| `(roles/[\w.]+)` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))
    assert {"roles/spanner.databaseUser"} < roles <= page_lists | NARROW


def refusals(words: list[str], environment: dict[str, str]) -> Iterator[str]:
    """Yield why the command or the settings of a job refuse these arguments in an environment."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            options = cli._parser().parse_args(words)
        options.settings.read(vars(options), environment)
    except SettingError as error:
        yield str(error)
    except SystemExit:
        yield output.getvalue()


def built(page: str) -> dict[str, str]:
    found = {}
    for words in calls(page, "docker", "build"):
        assert values(words, "--file") == ["k8s/Dockerfile"]
        found[values(words, "--tag")[0]] = (values(words, "--target") or ["worker"])[0]
    return found


def test_images_are_built_from_the_dockerfile() -> None:
    """Each target exists, a page pushes what it builds, and the development overlay runs the image of its page."""
    for page in PAGES:
        assert set(built(page).values()) <= STAGES.keys()
        pushed = {words[2] for words in calls(page, "docker", "push")}
        assert pushed == (set() if page == "k8s/README.md" else built(page).keys())
    pods = [each["spec"]["template"]["spec"] for each in rendered("overlays/development").of_kind("Deployment")]
    used = {each["image"] for pod in pods for each in [*pod.get("initContainers", []), *pod["containers"]]}
    assert {image for image in used if image.startswith("publishworker")} == built("k8s/README.md").keys()
    assert [set(built(page).values()) for page in (PIPELINE, PLATFORMS)] == [{"pipeline"}, {"dataproc"}]


def test_the_network_patch_changes_dns_and_https_of_both_policies(tmp_path: Path) -> None:
    [block] = re.findall(r"^```yaml\n(patches:.*?)^```", (ROOT / WORKER).read_text(), re.MULTILINE | re.DOTALL)
    objects = rendered(composed(tmp_path, "overlays/production", "console", **yaml.safe_load(block)))
    for name in ("publishworker", "outbox-console"):
        rules = objects.the("NetworkPolicy", name)["spec"]["egress"]
        to = {each["ports"][-1]["port"]: each["to"] for each in rules}
        assert to[53][0] == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
        link_local = ["169.254.20.10/32", "169.254.169.254/32"]
        assert [each["ipBlock"]["cidr"] for each in to[53][1:]] == [*link_local, "10.8.0.10/32"]
        assert to[443] == [{"ipBlock": {"cidr": "199.36.153.8/30"}}]


def test_an_overlay_of_ones_own_needs_no_change_of_the_repository(tmp_path: Path) -> None:
    """The page's kustomization, with this checkout instead of a version. The autoscaler names the metric."""
    text = (ROOT / WORKER).read_text(encoding="utf-8").partition("### Keep the values in your own repository")[2]
    [block] = re.findall(r"^```yaml\n(.*?)^```", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    found = yaml.safe_load(re.sub(r"https://github.com/my-org/outbox//(k8s/\S+)\?ref=v[\d.]+", r"\1", block))
    for kind in ("resources", "components"):
        found[kind] = [os.path.relpath(ROOT / each, tmp_path) for each in found[kind]]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(found))
    objects = rendered(tmp_path)
    objects.validate()
    assert {each["metadata"]["namespace"] for each in objects} == {"shop"}
    metric = objects.the("DatadogMetric")["metadata"]
    [used] = objects.the("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert used["external"]["metric"]["name"] == f"datadogmetric@{metric['namespace']}:{metric['name']}"
    assert objects.environment()["DD_VERSION"] == __version__


def test_jobs_take_the_arguments_of_the_pipelines_pages() -> None:
    """No job has variables. The batch's image has its main file, and a cluster gets what the tests ship."""
    [batch] = calls(PLATFORMS, *BATCH)
    [of_cluster] = calls(PLATFORMS, "gcloud", "dataproc", "jobs")
    [submitted] = calls(PIPELINE, "spark-submit")
    assert " ".join(SHIPPED) in " ".join(submitted)
    local = [words[1:] for words in calls(PIPELINE, "outbox-pipeline")]
    of_google = [each[each.index("--") + 1 :] for each in (batch, of_cluster)]
    for words in [*local, *of_google, submitted[submitted.index(SHIPPED[-1]) + 1 :]]:
        assert list(refusals(list(words), {})) == []
    assert len(local) == 1
    assert built(PLATFORMS)[values(batch, "--container-image")[0]] == "dataproc"
    root = variables("dataproc")["PYSPARK_PYTHON"].removesuffix("/bin/python")
    assert batch[len(BATCH)] == f"file://{root}/lib/python3.13/site-packages/outbox_pipeline/__main__.py"
    # The connector's jar goes to the folder of Spark's jars.
    page = (ROOT / PIPELINE).read_text(encoding="utf-8")
    assert f"gcs-connector-shaded.jar {variables('pipeline')['SPARK_HOME']}/jars/\n" in page


#: Prints the tasks of the DAG: the command as Airflow renders it, and the tasks that follow.
READ = """
import json, sys
from types import SimpleNamespace

from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.execution_time import macros

bag = DagBag(sys.argv[1])
assert not bag.import_errors, bag.import_errors
[dag] = bag.dags.values()
names = {"ds": "2026-11-21", "ts_nodash": "20261121T002000", "ti": SimpleNamespace(try_number=2), "macros": macros}
environment = dag.get_template_env()
print(json.dumps({
    task.task_id: (task.render_template(task.bash_command, names, environment), list(task.downstream_task_ids))
    for task in dag.tasks
}))
"""


@pytest.mark.long("it downloads Airflow, 200 MB")
@pytest.mark.timeout(900)
def test_airflow_reads_the_dag_and_the_jobs_accept_its_commands(tmp_path: Path):
    [dag] = re.findall(
        r"^```python\n(.*?)^```", (ROOT / PIPELINE).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags/outbox.py").write_text(dag, encoding="utf-8")
    python = tmp_path / "airflow/bin/python"
    uv = [Path(sys.executable).with_name("uv")]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "airflow"], check=True)
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, "apache-airflow==3.3.*"], check=True)
    variables = os.environ | {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    words = [python, "-c", READ, str(tmp_path / "dags")]
    read = subprocess.run(words, env=variables, check=True, capture_output=True, text=True)
    (archive, after), (audit, last) = json.loads(read.stdout.splitlines()[-1]).values()
    assert (after, last) == (["audit"], [])
    settings = []
    for command in (archive, audit):
        program, *flags = shlex.split(command)
        assert program == "outbox-pipeline"
        given = cli._parser().parse_args(flags)
        settings.append(given.settings.read(vars(given), {}))
    assert [type(each).__name__ for each in settings] == ["ArchiveSettings", "AuditSettings"]
    day = datetime(2026, 11, 20, tzinfo=UTC)
    assert (settings[1].since, settings[1].until) == (day, day + timedelta(days=1))
