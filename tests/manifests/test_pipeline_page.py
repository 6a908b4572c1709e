"""docs/operations/pipeline-deploy.md is carried out like deploy.md: by a shell whose tools write down their words."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.manifests.dockerfile import read
from tests.manifests.rendering import K8S, OVERLAYS, ROOT, of_kind, rendered
from tests.manifests.spark_rules import SPARK_RULES, jobs, refusals
from tests.manifests.test_deploy_page import (
    AT_ONCE,
    NUMBER,
    REGISTRY,
    TOOLS,
    Words,
    carried_out,
    gcloud_refusal,
    kubectl_refusal,
    of,
)

PAGE = ROOT / "docs" / "operations" / "pipeline-deploy.md"
WITH = (*TOOLS, "pip", "python")
#: The part that opens a batch's own arguments.
BATCH = ("dataproc", "batches", "submit", "pyspark")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the page changes."""
    made = tmp_path_factory.mktemp("pipeline")
    shutil.copytree(K8S, made / "k8s")
    return made


@pytest.fixture(scope="module")
def calls(folder: Path) -> list[Words]:
    """What the page calls."""
    return carried_out(PAGE, folder, WITH)


@pytest.fixture
def _gcloud() -> None:
    if shutil.which("gcloud") is None:
        pytest.skip("no gcloud in PATH: test_deploy_page.py says whether that is an error")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_gcloud")
def test_gcloud_takes_every_command(calls: list[Words], tmp_path: Path) -> None:
    """Its own parser, without an account; the batch among them."""
    commands = sorted(set(of(calls, "gcloud")))
    assert len(commands) >= 9
    assert [words for words in commands if words[:4] == BATCH]
    homes = [tmp_path / str(number) for number in range(len(commands))]
    for home in homes:
        home.mkdir()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert [each for each in pool.map(gcloud_refusal, commands, homes) if each] == []


@pytest.mark.usefixtures("_gcloud")
@pytest.mark.parametrize(
    "wrong", ["dataproc batches submit pyspark x.py --image=y", "storage buckets add-iam-policy-binding gs://b"]
)
def test_gclouds_parser_bites(wrong: str, tmp_path: Path) -> None:
    """An unknown flag and a missing one are noticed."""
    assert "ERROR: (gcloud" in gcloud_refusal(tuple(wrong.split()), tmp_path)


def test_kubectl_takes_every_command(calls: list[Words], folder: Path) -> None:
    """Its own parser; a kustomization that is applied is there and renders."""
    # What the shell asks its own configuration for is not there.
    commands = [words for words in of(calls, "kubectl") if words[0] != "config"]
    assert len(commands) >= 5
    assert [refusal for words in commands if (refusal := kubectl_refusal(words, folder))] == []


def test_the_jobs_take_their_arguments(calls: list[Words]) -> None:
    """Those on one machine and those of the batch, which have no variables to fall back to."""
    local = [words[2:] for words in of(calls, "python") if words[0] == "-m"]
    batches = [words[words.index("--") + 1 :] for words in of(calls, "gcloud") if words[:4] == BATCH]
    assert len(local) == len(batches) == 1
    for words in [*local, *batches]:
        assert list(refusals(list(words), {})) == []


def test_what_the_page_sets_is_what_is_applied(calls: list[Words], folder: Path) -> None:
    """After its `sed` lines the jobs have the image and the database, and keep the rules."""
    assert calls
    objects = rendered(folder / "k8s" / "spark")
    assert {job["spec"]["template"]["image"] for job in jobs(objects)} == {f"{REGISTRY}/outbox-pipeline:0.1.0"}
    assert [complaint for rule in SPARK_RULES for complaint in rule(objects)] == []


def test_other_names_than_the_placeholders_are_set_everywhere(tmp_path: Path) -> None:
    """Somebody else's project, database, bucket and environment: no placeholder is left."""
    shutil.copytree(K8S, tmp_path / "k8s")
    text = PAGE.read_text(encoding="utf-8")
    for line, others in {
        "PROJECT=my-project": "PROJECT=acme",
        "INSTANCE=main DATABASE=shop ENV=production": "INSTANCE=big DATABASE=books ENV=staging",
        "BUCKET=my-bucket": "BUCKET=acme-archive",
    }.items():
        assert line in text
        text = text.replace(line, others, 1)
    page = tmp_path / "page.md"
    page.write_text(text)
    carried_out(page, tmp_path, WITH)
    objects = rendered(tmp_path / "k8s" / "spark")
    assert [complaint for rule in SPARK_RULES for complaint in rule(objects)] == []
    [config] = of_kind(objects, "ConfigMap")
    wanted = {"OUTBOX_PROJECT": "acme", "OUTBOX_INSTANCE": "big", "OUTBOX_DATABASE": "books"}
    wanted |= {"OUTBOX_ARCHIVE": "gs://acme-archive/archive"}
    assert wanted.items() <= config["data"].items()
    assert "my-bucket" not in str(objects)
    assert "production" not in str(objects)


def test_grants_name_the_account_of_the_jobs(calls: list[Words]) -> None:
    """The roles of the table, for the account of k8s/spark in the namespace of production."""
    [account] = of_kind(rendered(K8S / "spark"), "ServiceAccount")
    [namespace] = of_kind(rendered(OVERLAYS["production"]), "Namespace")
    wanted = (
        f"principal://iam.googleapis.com/projects/{NUMBER}/locations/global/workloadIdentityPools/my-project.svc.id.goog"
        f"/subject/ns/{namespace['metadata']['name']}/sa/{account['metadata']['name']}"
    )
    granted: dict[str, set[str]] = {}
    for words in of(calls, "gcloud"):
        if "add-iam-policy-binding" in words:
            flags = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
            granted.setdefault(flags["--member"], set()).add(flags["--role"])
    table = PAGE.read_text(encoding="utf-8").partition("| role | on | why |")[2]
    assert granted.pop(wanted) == {"roles/spanner.databaseUser", "roles/storage.objectUser"}
    [(batch, roles)] = granted.items()
    assert batch == "serviceAccount:outbox-pipeline@my-project.iam.gserviceaccount.com"
    of_dataproc = {"roles/dataproc.worker", "roles/artifactregistry.reader"}
    assert of_dataproc < roles
    assert [role for role in roles - of_dataproc if f"| `{role}` |" not in table] == []


def test_images_are_built_from_the_dockerfile(calls: list[Words]) -> None:
    """Both targets are there; what is pushed was built; files that are named are where the image has them."""
    built = {}
    for words in of(calls, "docker"):
        if words[0] == "build":
            stages = read(ROOT / words[words.index("--file") + 1])
            target = words[words.index("--target") + 1]
            assert target in stages
            built[words[words.index("--tag") + 1]] = target
    assert {words[1] for words in of(calls, "docker") if words[0] == "push"} == built.keys()
    assert set(built.values()) == {"pipeline", "dataproc"}
    [batch] = [words for words in of(calls, "gcloud") if words[:4] == BATCH]
    [image] = [word.partition("=")[2] for word in batch if word.startswith("--container-image=")]
    assert built[image] == "dataproc"
    [environment] = [step.rest for step in read(ROOT / "k8s/Dockerfile")["dataproc"].all("ENV")]
    root = environment.partition("PYSPARK_PYTHON=")[2].partition("/bin/")[0]
    assert batch[4] == f"file://{root}/lib/python3.11/site-packages/outbox_pipeline/__main__.py"


def test_the_connectors_image_has_the_folder_of_the_jars() -> None:
    """The lines of the Dockerfile in the page are for the SPARK_HOME of ours."""
    [environment] = [step.rest for step in read(ROOT / "k8s/Dockerfile")["pipeline"].all("ENV")]
    home = environment.partition("SPARK_HOME=")[2].split()[0]
    assert f"gcs-connector-shaded.jar {home}/jars/\n" in PAGE.read_text(encoding="utf-8")
