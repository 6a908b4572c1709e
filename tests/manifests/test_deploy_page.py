"""A shell carries out the pages that deploy; its tools only record their arguments, which their parsers then accept."""

import functools
import itertools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml

import outbox.cli
import publishworker.process.cli
from tests.manifests.rendering import (
    GOLDEN,
    K8S,
    OVERLAYS,
    ROOT,
    SPARK,
    check_golden,
    kubectl,
    of_kind,
    programs,
    rendered,
    rendered_text,
    the,
)
from tests.manifests.test_dockerfile import STAGES, variables
from tests.manifests.test_spark import refusals
from tests.support.cluster import SHIPPED

WORKER, PIPELINE = "docs/operations/deploy.md", "docs/operations/pipeline-deploy.md"
PAGES = (WORKER, PIPELINE, "k8s/README.md")
PARSERS = {"outbox": outbox.cli._parser, "publishworker": publishworker.process.cli._parser}
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
    ours = [words for name in PARSERS for words in calls(WORKER, name)]
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
    ("page", "golden", "image"),
    [(WORKER, "production.yaml", "publishworker:0.2.0"), (PIPELINE, "spark.yaml", "outbox-pipeline:0.1.0")],
)
def test_only_the_values_that_a_page_sets_change(page: str, golden: str, image: str, tmp_path: Path) -> None:
    """With other names than the placeholders: the overlay is its golden file with these names, and no other change."""
    text = (ROOT / page).read_text(encoding="utf-8")
    name, _, version = image.partition(":")
    defaults = "export PROJECT=my-project REGION=europe-west1 INSTANCE=main DATABASE=shop ENV=production"
    assert defaults in text
    text = text.replace(defaults, "export PROJECT=acme REGION=europe-west1 INSTANCE=big DATABASE=books ENV=staging", 1)
    carried_out(text.replace("BUCKET=my-bucket", "BUCKET=acme-archive", 1), tmp_path)
    expected = (GOLDEN / golden).read_text(encoding="utf-8")
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
    found = rendered_text(tmp_path / "k8s" / ("spark" if page == PIPELINE else "overlays/production"))
    # The hash of the settings in the ConfigMap's name differs.
    assert re.sub(r"publishworker-[a-z\d]{10}\b", "HASH", found) == re.sub(
        r"publishworker-[a-z\d]{10}\b", "HASH", expected
    )
    assert "CREATE ROLE publishworker;" in (ROOT / "schema/roles.sql").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "folder"), [(WORKER, OVERLAYS["production"]), (PIPELINE, SPARK)])
def test_roles_are_granted_to_the_account_of_the_manifests(page: str, folder: Path) -> None:
    """The account has the roles of the page's table, and none on the project."""
    objects = rendered(folder)
    namespace, account = (the(objects, kind)["metadata"]["name"] for kind in ("Namespace", "ServiceAccount"))
    pool = f"//iam.googleapis.com/projects/{NUMBER}/locations/global/workloadIdentityPools/my-project.svc.id.goog"
    principal = f"principal:{pool}/subject/ns/{namespace}/sa/{account}"
    granted = [words for words in calls(page, "gcloud") if values(words, "--member") == [principal]]
    assert "projects" not in {words[1] for words in granted}
    roles = {role for words in granted for role in values(words, "--role")}
    page_lists = set(re.findall(r"^\| `(roles/[\w.]+)` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))
    assert {"roles/spanner.databaseUser"} < roles <= page_lists | NARROW


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
    pods = [each["spec"]["template"]["spec"] for each in of_kind(rendered(OVERLAYS["development"]), "Deployment")]
    used = {each["image"] for pod in pods for each in [*pod.get("initContainers", []), *pod["containers"]]}
    assert {image for image in used if image.startswith("publishworker")} == built("k8s/README.md").keys()
    assert set(built(PIPELINE).values()) == {"pipeline", "dataproc"}


def test_the_network_patch_changes_dns_and_https_of_both_policies(tmp_path: Path) -> None:
    [block] = re.findall(
        r"^```yaml\n(patches:.*?)^```", (ROOT / "docs/operations/deploy.md").read_text(), re.MULTILINE | re.DOTALL
    )
    production, console = OVERLAYS["production"], K8S / "components/console"
    overlay = {"resources": [os.path.relpath(production, tmp_path)], "components": [os.path.relpath(console, tmp_path)]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay | yaml.safe_load(block)))
    for name in ("publishworker", "outbox-console"):
        rules = the(rendered(tmp_path), "NetworkPolicy", name)["spec"]["egress"]
        to = {each["ports"][-1]["port"]: each["to"] for each in rules}
        assert to[53][0] == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
        link_local = ["169.254.20.10/32", "169.254.169.254/32"]
        assert [each["ipBlock"]["cidr"] for each in to[53][1:]] == [*link_local, "10.8.0.10/32"]
        assert to[443] == [{"ipBlock": {"cidr": "199.36.153.8/30"}}]


def test_jobs_take_the_arguments_of_the_pipelines_pages() -> None:
    """No job has variables. The batch's image has its main file, and a cluster gets what the tests ship."""
    [batch] = calls(PIPELINE, *BATCH)
    [submitted] = calls(PIPELINE, "spark-submit")
    assert " ".join(SHIPPED) in " ".join(submitted)
    local = [words[1:] for words in calls(PIPELINE, "outbox-pipeline")]
    for words in [*local, batch[batch.index("--") + 1 :], submitted[submitted.index(SHIPPED[-1]) + 1 :]]:
        assert list(refusals(list(words), {})) == []
    assert len(local) == 1
    assert built(PIPELINE)[values(batch, "--container-image")[0]] == "dataproc"
    root = variables("dataproc")["PYSPARK_PYTHON"].removesuffix("/bin/python")
    assert batch[len(BATCH)] == f"file://{root}/lib/python3.11/site-packages/outbox_pipeline/__main__.py"
    # The connector's jar goes to the folder of Spark's jars.
    page = (ROOT / PIPELINE).read_text(encoding="utf-8")
    assert f"gcs-connector-shaded.jar {variables('pipeline')['SPARK_HOME']}/jars/\n" in page
