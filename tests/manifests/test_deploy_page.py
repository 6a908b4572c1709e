"""docs/operations/deploy.md is carried out as it stands there, by a shell whose tools only write down their words.

Then each tool's own parser looks at the words: gcloud's and kubectl's without a network, ours in this process.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

import outbox.cli
import publishworker.cli
from tests.manifests.dockerfile import read
from tests.manifests.rendering import (
    K8S,
    OVERLAYS,
    ROOT,
    container,
    environment,
    kubectl,
    of_kind,
    rendered,
    the,
    worker,
)
from tests.manifests.rules import RULES

pytestmark = pytest.mark.xdist_group("deploy-page")  # gcloud is asked once

PAGES = {name: ROOT / name for name in ("docs/operations/deploy.md", "k8s/README.md")}
PARSERS = {"outbox": outbox.cli._parser, "publishworker": publishworker.cli._parser}
TOOLS = ("gcloud", "kubectl", "docker", "helm", *PARSERS)
#: What the registry and the project answer.
REGISTRY, NUMBER = "registry.example/my-project/outbox", "123456789012"
#: gcloud says so after it has parsed and before it calls anything.
NO_ACCOUNT = "You do not currently have an active account selected."
#: Seconds for one command; each takes about one.
SECONDS = 60
#: At once: gcloud needs a core while it starts.
AT_ONCE = 4

Words = tuple[str, ...]


def script(page: Path) -> str:
    """Return all that the page shows behind a prompt."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)", "\n".join(blocks), re.MULTILINE)
    return "\n".join(commands)


def carried_out(page: Path, folder: Path, tools: tuple[str, ...] = TOOLS) -> list[Words]:
    """Run the page in `folder`, and return the words of each call of a tool, with their variables filled in."""
    record = folder / "record"
    # One write a call: the two ends of a pipe run at once.
    stub = f"""printf '%s\\0' $TOOL "$@" $'\\x1e' >>{record}; answer "$*";"""
    stubs = [f"{tool}() {{ {stub.replace('$TOOL', tool)} }}" for tool in tools]
    answer = f"""answer() {{ case "$1" in *registryUri*) echo {REGISTRY};; *projectNumber*) echo {NUMBER};; esac; }}"""
    keys = "export DD_API_KEY=api DD_APP_KEY=app"
    text = "\n".join(["set -eu", f": >{record}", answer, *stubs, keys, script(page)])
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return [tuple(call.split("\0")[:-1]) for call in record.read_text().split("\x1e\0")[:-1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the page changes."""
    made = tmp_path_factory.mktemp("deploy")
    shutil.copytree(K8S, made / "k8s")
    return made


@pytest.fixture(scope="module")
def calls(folder: Path) -> list[Words]:
    """What deploy.md calls."""
    return carried_out(PAGES["docs/operations/deploy.md"], folder)


def of(calls: list[Words], tool: str) -> Iterator[Words]:
    """Yield the words of one tool's calls, without its name."""
    yield from (words[1:] for words in calls if words[0] == tool)


def gcloud_refusal(words: Words, home: Path) -> str:
    """Return what gcloud's parser has against a command line, or nothing."""
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
    }
    done = subprocess.run(
        ["gcloud", *words],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    if done.returncode == 0 or NO_ACCOUNT in done.stderr:
        return ""
    return f"{' '.join(words)}: {done.returncode} {done.stderr[:500]}"


@pytest.fixture
def _gcloud() -> None:
    if shutil.which("gcloud"):
        return
    if os.environ.get("CI"):
        pytest.fail("no gcloud in PATH")
    pytest.skip("no gcloud in PATH")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_gcloud")
def test_gcloud_takes_every_command(calls: list[Words], tmp_path: Path) -> None:
    """Its own parser, without an account: a wrong flag or a missing one is an error of usage."""
    # `gcloud auth login` waits for a browser.
    # One of those that differ by a topic or a role is enough: the parser sees no difference, and each takes a second.
    shapes = {re.sub(r"roles/[\w.]+|invoices", "orders", " ".join(words)): words for words in of(calls, "gcloud")}
    commands = sorted(words for words in shapes.values() if "login" not in words)
    assert len(commands) > 15
    homes = [tmp_path / str(number) for number in range(len(commands))]
    for home in homes:
        home.mkdir()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        refusals = list(pool.map(gcloud_refusal, commands, homes))
    assert [each for each in refusals if each] == []


@pytest.mark.usefixtures("_gcloud")
@pytest.mark.parametrize(
    "wrong",
    [
        "spanner databases create shop",
        "pubsub topics create orders --retention=1d",
        "container clusters create-automatic outbox",
    ],
)
def test_gclouds_parser_bites(wrong: str, tmp_path: Path) -> None:
    """A missing flag, an unknown one and an unknown command are noticed."""
    assert "ERROR: (gcloud" in gcloud_refusal(tuple(wrong.split()), tmp_path)


def kubectl_refusal(words: Words, folder: Path) -> str:
    """Return what kubectl has against a command line before it calls a cluster, or nothing."""
    closed = ["--kubeconfig=/dev/null", "--server=https://127.0.0.1:9", "--token=none"]
    before = words.index("--") if "--" in words else len(words)
    done = subprocess.run(
        [kubectl(), *words[:before], *closed, *words[before:]],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    reached = done.returncode == 0 or "127.0.0.1:9" in done.stderr
    return "" if reached else f"{' '.join(words)}: {done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_kubectl_takes_every_command(page: str, tmp_path: Path) -> None:
    """Its own parser; a kustomization that is applied is there and renders, and flags are known."""
    shutil.copytree(K8S, tmp_path / "k8s")
    commands = [words for words in of(carried_out(PAGES[page], tmp_path), "kubectl") if "diff" not in words]
    assert commands
    assert [refusal for words in commands if (refusal := kubectl_refusal(words, tmp_path))] == []


@pytest.mark.parametrize(
    "wrong", ["get pods --lable x", "rollout statuz deployment/x", "apply -k k8s/overlays/staging"]
)
def test_kubectls_parser_bites(wrong: str) -> None:
    """An unknown flag, an unknown command and a kustomization that is not there are noticed."""
    assert kubectl_refusal(tuple(wrong.split()), ROOT)


def test_our_own_commands_parse(calls: list[Words]) -> None:
    """Flags and arguments of outbox and publishworker, also of what is run inside of a pod."""
    ours = [words for words in calls if words[0] in PARSERS]
    ours += [words[words.index("--") + 1 :] for words in of(calls, "kubectl") if "--" in words]
    assert {words[0] for words in ours} == set(PARSERS)
    for words in ours:
        PARSERS[words[0]]().parse_args(words[1:])


def test_what_the_page_sets_is_what_is_applied(calls: list[Words], folder: Path) -> None:
    """After its `sed` lines the overlay has the image, the database and the environment, and keeps the rules."""
    assert calls
    objects = rendered(folder / "k8s" / "overlays" / "production")
    found = container(worker(objects), "publishworker")
    assert found["image"] == f"{REGISTRY}/publishworker:0.2.0"  # of the section on updates
    values = environment(objects, worker(objects), found)
    assert values["DD_VERSION"] == "0.2.0"
    assert values["DD_ENV"] == "production"
    assert (values["OUTBOX_PROJECT"], values["OUTBOX_INSTANCE"]) == ("my-project", "main")
    role = values["OUTBOX_DATABASE_ROLE"]
    assert f"CREATE ROLE {role};" in (ROOT / "schema" / "roles.sql").read_text(encoding="utf-8")
    assert [complaint for rule in RULES for complaint in rule(objects)] == []


def test_other_names_than_the_placeholders_are_set_everywhere(tmp_path: Path) -> None:
    """Somebody else's project, database and environment: no placeholder is left."""
    shutil.copytree(K8S, tmp_path / "k8s")
    page = tmp_path / "page.md"
    text = PAGES["docs/operations/deploy.md"].read_text(encoding="utf-8")
    others = "PROJECT=acme INSTANCE=big DATABASE=books ENV=staging"
    text = text.replace("PROJECT=my-project", others, 1)
    for default in ("INSTANCE=main ", "DATABASE=shop ", "ENV=production "):
        text = text.replace(f" {default}", " ", 1)
    page.write_text(text)
    carried_out(page, tmp_path)
    objects = rendered(tmp_path / "k8s" / "overlays" / "production")
    assert [complaint for rule in RULES for complaint in rule(objects)] == []
    values = environment(objects, worker(objects), container(worker(objects), "publishworker"))
    wanted = {"OUTBOX_PROJECT": "acme", "OUTBOX_INSTANCE": "big", "OUTBOX_DATABASE": "books", "DD_ENV": "staging"}
    assert wanted.items() <= values.items()


def test_grants_name_the_account_of_the_overlay(calls: list[Words]) -> None:
    """Only the roles of the table, for the namespace and the account that production has."""
    objects = rendered(OVERLAYS["production"])
    [namespace] = of_kind(objects, "Namespace")
    [account] = of_kind(objects, "ServiceAccount")
    wanted = (
        f"principal://iam.googleapis.com/projects/{NUMBER}/locations/global/workloadIdentityPools/my-project.svc.id.goog"
        f"/subject/ns/{namespace['metadata']['name']}/sa/{account['metadata']['name']}"
    )
    roles = set()
    for words in of(calls, "gcloud"):
        if "add-iam-policy-binding" in words and f"--member={wanted}" in words:
            assert "projects" not in words
            roles.add(next(word.removeprefix("--role=") for word in words if word.startswith("--role=")))
    table = PAGES["docs/operations/deploy.md"].read_text(encoding="utf-8").partition("| role | on | why |")[2]
    narrow = {"roles/spanner.fineGrainedAccessUser", "roles/spanner.databaseRoleUser"}
    assert roles == {"roles/spanner.databaseUser", "roles/pubsub.publisher", *narrow}
    assert [role for role in roles - narrow if f"| `{role}` |" not in table] == []
    [condition] = {word for words in calls for word in words if word.startswith("--condition=expression=")}
    assert condition.startswith(
        '--condition=expression=resource.type == "spanner.googleapis.com/DatabaseRole" && '
        'resource.name.endsWith("/publishworker"),title='
    )


@pytest.mark.parametrize("page", PAGES)
def test_images_are_built_from_the_dockerfile(page: str, tmp_path: Path) -> None:
    """The file and the targets are there, and the development overlay runs what its page builds."""
    shutil.copytree(K8S, tmp_path / "k8s")
    builds = [words for words in of(carried_out(PAGES[page], tmp_path), "docker") if words[0] == "build"]
    assert builds
    for words in builds:
        stages = read(ROOT / words[words.index("--file") + 1])
        if "--target" in words:
            assert words[words.index("--target") + 1] in stages
    if page == "k8s/README.md":
        tags = {words[words.index("--tag") + 1] for words in builds}
        deployments = of_kind(rendered(OVERLAYS["development"]), "Deployment")
        pods = [each["spec"]["template"]["spec"] for each in deployments]
        used = {each["image"] for pod in pods for each in [*pod.get("initContainers", []), *pod["containers"]]}
        assert {image for image in used if image.startswith("publishworker")} == tags


def test_the_agents_values_fit_the_page(calls: list[Words]) -> None:
    """The Secret has the name and the keys that the chart reads, and what the components need is switched on."""
    [install] = of(calls, "helm")
    values = yaml.safe_load((ROOT / install[install.index("--values") + 1]).read_text(encoding="utf-8"))
    secret = next(words for words in of(calls, "kubectl") if "secret" in words)
    name = secret[secret.index("generic") + 1]
    assert values["datadog"]["apiKeyExistingSecret"] == values["datadog"]["appKeyExistingSecret"] == name
    assert {"--from-literal=api-key=api", "--from-literal=app-key=app"} <= set(secret)
    assert values["datadog"]["csi"]["enabled"]
    assert values["clusterAgent"]["metricsProvider"] == {"enabled": True, "useDatadogMetrics": True}


def test_the_checklist_shows_commands_that_parse() -> None:
    """Each line of the checklist has a command or a page; our own commands parse, kubectl's name what is there."""
    text = (ROOT / "docs/operations/checklist.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert [row for row in rows if "`" not in row and "](" not in row] == []
    production = rendered(OVERLAYS["production"])
    for command in re.findall(r"`((?:outbox|publishworker|kubectl) [^`]+)`", text):
        words = command.replace("TOPIC ...", "TOPIC").split()
        if words[0] != "kubectl":
            PARSERS[words[0]]().parse_args([*words[1:]])
        elif "deployment/" in command:
            the(production, "Deployment", command.rpartition("deployment/")[2])
        assert words[0] != "kubectl" or words[2] == "outbox"
