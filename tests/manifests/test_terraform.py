"""The Terraform modules: their syntax, and the names of their arguments, against an extract of the providers' schemas.

Terraform itself evaluates the locals, without a provider: `terraform_data` stands for a resource.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hcl2
import pytest

from tests.manifests.rendering import K8S, ROOT

MODULE = K8S / "terraform"
#: terraform_schema.json names its source.
SCHEMA: dict[str, Any] = json.loads((ROOT / "tests/manifests/terraform_schema.json").read_text(encoding="utf-8"))
MODULES = {"terraform": MODULE, "cloud-run": MODULE / "cloud-run", "datadog": MODULE / "datadog"}
FILES = {
    f"{name}/{file.name}": file.read_text(encoding="utf-8")
    for name, folder in MODULES.items()
    for file in sorted(folder.glob("*.tf"))
}
TEXT = "\n".join(text for name, text in FILES.items() if name.startswith("terraform/"))
#: Arguments and blocks that each resource has.
META = {"for_each", "count", "lifecycle"}


def parsed(kind: str, module: str = "") -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the labels and the content of each block of a kind, such as `resource`."""
    for name, text in FILES.items():
        for block in hcl2.loads(text).get(kind, []) if name.startswith(module) else ():
            yield _unwrapped(block, [])


def _unwrapped(block: dict[str, Any], labels: list[str]) -> tuple[list[str], dict[str, Any]]:
    label = next(iter(block))
    if label.startswith('"'):
        return _unwrapped(block[label], [*labels, label.strip('"')])
    return labels, {name: value for name, value in block.items() if not name.startswith("__")}


def differences(given: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    blocks = schema.get("blocks", {})
    for block in given.pop("dynamic", []):
        [(name, dynamic)] = [(key.strip('"'), value) for key, value in block.items() if not key.startswith("__")]
        given[name] = dynamic["content"]
    yield from sorted(given.keys() - META - {*schema["required"], *schema["optional"], *blocks})
    yield from sorted({*schema["required"]} - given.keys())
    for name in given.keys() & blocks.keys():
        for block in given[name]:
            yield from differences({key: block[key] for key in block if not key.startswith("__")}, blocks[name])


@pytest.mark.parametrize("resource", list(parsed("resource")), ids=lambda resource: ".".join(resource[0]))
def test_a_resource_has_the_arguments_of_its_provider(resource: tuple[list[str], dict[str, Any]]) -> None:
    """No unknown argument, and no required one is missing. Types and values are not checked."""
    [kind, _], given = resource
    assert list(differences(given, SCHEMA["resources"][kind])) == []


@pytest.mark.parametrize("module", MODULES)
def test_each_reference_has_a_declaration_and_the_other_way_round(module: str) -> None:
    text = "\n".join(each for name, each in FILES.items() if name.startswith(f"{module}/"))
    declared = {labels[0] for labels, _ in parsed("variable", f"{module}/")}
    assert set(re.findall(r"\bvar\.(\w+)", text)) == declared
    named = {name for _, block in parsed("locals", f"{module}/") for name in block}
    assert set(re.findall(r"\blocal\.(\w+)", text)) == named
    resources = {".".join(labels) for labels, _ in parsed("resource", f"{module}/")}
    assert set(re.findall(r"(?<![.\w/])((?:google|datadog)_\w+\.\w+)", text)) <= resources


def test_a_grant_follows_its_resource() -> None:
    """A topic that Terraform replaces has the same name, and none of its grants."""
    grants = [
        each for each in parsed("resource") if re.search(r"(topic|subscription)_iam_(member|binding)$", each[0][0])
    ]
    assert len(grants) == 6
    for [_, name], block in grants:
        [of] = re.findall(r"google_pubsub_\w+\.\w+\[", block.get("topic", "") + block.get("subscription", ""))
        [lifecycle] = block["lifecycle"]
        assert lifecycle["replace_triggered_by"] == [f"${{{of}each.key].id}}"], name


def test_the_worker_has_the_roles_of_the_deploy_page() -> None:
    page = (ROOT / "docs/operations/deploy.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(roles/[\w.]+)` \|", page, re.MULTILINE))
    of_worker = [block for _, block in parsed("resource") if re.search(r"local\.worker\b", str(block))]
    roles = {block["role"].strip('"') for block in of_worker}
    limited = {block["role"].strip('"') for [_, name], block in parsed("resource") if name.startswith("database_")}
    assert "roles/spanner.databaseUser" not in TEXT
    assert roles == documented - {"roles/spanner.databaseUser"}
    assert limited == set(re.findall(r"--role=(roles/spanner\.(?!databaseUser)\w+)", page))
    assert re.sub(r"\$(NUMBER|PROJECT)", "N", "projects/$NUMBER/locations/global/workloadIdentityPools/$PROJECT") in (
        re.sub(r"\$\{var\.\w+\}", "N", TEXT)
    )


def terraform(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    if not shutil.which("terraform"):
        pytest.skip("not in PATH: terraform")
    command = ["terraform", f"-chdir={folder}", *words, "-no-color"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_format_is_that_of_terraform() -> None:
    done = terraform(MODULE, "fmt", "-check", "-diff", "-recursive")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("topics", "sentence"),
    [
        ({"orders": ["billing", "a23"], "empty": [], "invoices": ["a" * 26]}, ""),
        ({"orders": ["billing"], "invoices": ["mails", "billing"]}, "A subscription has one topic."),
        ({"orders": ["a2"]}, "A subscription has 3 to 26 characters"),
        ({"orders": ["a" * 27]}, "A subscription has 3 to 26 characters"),
        ({"orders": ["google-ads"]}, "does not begin with goog"),
    ],
    ids=str,
)
def test_a_subscription_that_cannot_be_created_is_refused(topics: Any, sentence: str, tmp_path: Path) -> None:
    """Without providers, so the plan has the variables only."""
    (tmp_path / "variables.tf").write_text(FILES["terraform/variables.tf"])
    required = dict.fromkeys(["project", "project_number", "instance", "database"], "1")
    (tmp_path / "terraform.tfvars.json").write_text(json.dumps(required | {"topics": topics}))
    done = terraform(tmp_path, "plan", "-input=false")
    assert (done.returncode == 0) == (sentence == "")
    assert sentence in " ".join(done.stderr.replace("│", "").split())


def test_each_database_role_exists() -> None:
    sql = (ROOT / "schema/roles.sql").read_text(encoding="utf-8")
    named = set(re.findall(r'"(publishworker|outbox_\w+)"', FILES["terraform/main.tf"]))
    assert named <= set(re.findall(r"CREATE ROLE (\w+);", sql))
    assert {"publishworker", "outbox_application", "outbox_operator", "outbox_viewer"} <= named


def planned(folder: Path, outputs: str, *, module: str, stand_ins: str = "", **values: Any) -> dict[str, Any]:
    """Return the outputs that Terraform plans with the locals of a module."""
    main = re.findall(r"(?ms)^locals \{\n.*?^\}\n", FILES[f"{module}/main.tf"])[0]
    main = re.sub(r"google_service_account\.(\w+)\[name\]\.member", r"terraform_data.\1[name].id", main)
    (folder / "main.tf").write_text(main.replace("${path.module}/../../datadog", str(K8S / "datadog")))
    (folder / "variables.tf").write_text(FILES[f"{module}/variables.tf"])
    (folder / "outputs.tf").write_text(outputs + stand_ins)
    required = dict.fromkeys(["project", "project_number", "instance", "database"], "1")
    (folder / "terraform.tfvars.json").write_text(json.dumps(required | {"topics": {}} | values))
    assert (started := terraform(folder, "init")).returncode == 0, started.stderr
    done = terraform(folder, "plan", "-input=false", "-out=plan")
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(terraform(folder, "show", "-json", "plan").stdout)
    return plan


#: An account of the same configuration, whose name is known only after it has been created.
STAND_INS = """
resource "terraform_data" "subscribers" {
  for_each = local.subscriptions
}
resource "terraform_data" "grants" {
  for_each = local.database_roles
  input    = each.value
}
"""


def test_members_get_their_database_role_only(tmp_path: Path) -> None:
    """Also members that do not exist yet: only the names of the maps are keys of resources."""
    members = {"applications": {"a": "a", "b": "b"}, "operators": {"c": "c"}, "viewers": {"d": "d"}}
    topics = {"orders": ["billing", "stock"]}
    flags = {"jobs": True, "spark": True, "inbox": True}
    plan = planned(tmp_path, "", module="terraform", stand_ins=STAND_INS, topics=topics, **members, **flags)
    grants = {
        each["index"]: each["values"]["input"]
        for each in plan["planned_values"]["root_module"]["resources"]
        if each["name"] == "grants"
    }
    found = {name: (each.get("member", "/?").rpartition("/")[2], each["role"]) for name, each in grants.items()}
    assert found == {
        "application a": ("a", "outbox_application"),
        "application b": ("b", "outbox_application"),
        "operator c": ("c", "outbox_operator"),
        "viewer d": ("d", "outbox_viewer"),
        "worker": ("publishworker", "publishworker"),
        "console": ("outbox-console", "outbox_viewer"),
        "jobs": ("publishworker-job", "outbox_operator"),
        "spark": ("outbox-pipeline", "outbox_pipeline"),
        "subscriber billing": ("?", "outbox_subscriber"),
        "subscriber stock": ("?", "outbox_subscriber"),
    }


def test_each_release_has_its_own_monitors(tmp_path: Path) -> None:
    """The names of one release in the files become those of the module's variables, also in titles."""
    values = {
        "env": "staging",
        "service": "eu-publishworker",
        "pipeline_account": "eu-pipeline",
        "docs_url": "https://d",
    }
    plan = planned(tmp_path, 'output "texts" {\n  value = local.texts\n}\n', module="datadog", **values)
    texts = plan["planned_values"]["outputs"]["texts"]["value"]
    files = {file.name for file in (K8S / "datadog/monitors").glob("*.json")}
    assert texts.keys() == files | {"dashboard", "slo", "burn-rate"}
    for name, text in texts.items():
        assert not re.findall(
            r"env:production|(?:service|autoscaler):publishworker|outbox-pipeline[,}]|docs_url", text
        ), name
        assert '"Outbox eu-publishworker, staging: ' in text
        json.loads(text)
    variables = {each["name"]: each["defaults"] for each in json.loads(texts["dashboard"])["template_variables"]}
    assert (variables["env"], variables["service"]) == (["staging"], ["eu-publishworker"])
    assert "${slo_id}" in texts["burn-rate"]
