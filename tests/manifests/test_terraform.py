"""The Terraform module: its syntax, and the names of its arguments, against an extract of the providers' schemas."""

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
FILES = {file.name: file.read_text(encoding="utf-8") for file in sorted(MODULE.glob("*.tf"))}
TEXT = "\n".join(FILES.values())
#: Arguments that each resource has.
META = {"for_each", "count"}


def parsed(kind: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the labels and the content of each block of a kind, such as `resource`."""
    for text in FILES.values():
        for block in hcl2.loads(text).get(kind, []):
            yield _unwrapped(block, [])


def _unwrapped(block: dict[str, Any], labels: list[str]) -> tuple[list[str], dict[str, Any]]:
    label = next(iter(block))
    if label.startswith('"'):
        return _unwrapped(block[label], [*labels, label.strip('"')])
    return labels, {name: value for name, value in block.items() if not name.startswith("__")}


def differences(given: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    blocks = schema.get("blocks", {})
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


def test_each_reference_has_a_declaration_and_the_other_way_round() -> None:
    declared = {labels[0] for labels, _ in parsed("variable")}
    assert set(re.findall(r"\bvar\.(\w+)", TEXT)) == declared
    named = {name for _, block in parsed("locals") for name in block}
    assert set(re.findall(r"\blocal\.(\w+)", TEXT)) == named
    resources = {".".join(labels) for labels, _ in parsed("resource")}
    assert set(re.findall(r"(?<![.\w])((?:google|datadog)_\w+\.\w+)", TEXT)) <= resources


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
    done = terraform(MODULE, "fmt", "-check", "-diff")
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
    (tmp_path / "variables.tf").write_text(FILES["variables.tf"])
    required = dict.fromkeys(["project", "project_number", "instance", "database"], "1")
    (tmp_path / "terraform.tfvars.json").write_text(json.dumps(required | {"topics": topics}))
    done = terraform(tmp_path, "plan", "-input=false")
    assert (done.returncode == 0) == (sentence == "")
    assert sentence in " ".join(done.stderr.replace("│", "").split())


def test_each_database_role_exists() -> None:
    sql = (ROOT / "schema/roles.sql").read_text(encoding="utf-8")
    named = set(re.findall(r'"(publishworker|outbox_\w+)"', FILES["main.tf"]))
    assert named <= set(re.findall(r"CREATE ROLE (\w+);", sql))
    assert {"publishworker", "outbox_application", "outbox_operator", "outbox_viewer"} <= named


def test_members_get_their_database_role_only(tmp_path: Path) -> None:
    """Terraform itself evaluates the expression."""
    (tmp_path / "main.tf").write_text(re.findall(r"(?ms)^locals \{\n.*?^\}\n", FILES["main.tf"])[0])
    (tmp_path / "variables.tf").write_text(FILES["variables.tf"])
    (tmp_path / "outputs.tf").write_text('output "roles" {\n  value = local.database_roles\n}\n')
    required = dict.fromkeys(["project", "project_number", "instance", "database"], "1")
    members = {"applications": ["a", "b"], "operators": ["c"], "viewers": ["c"]}
    (tmp_path / "terraform.tfvars.json").write_text(json.dumps(required | {"topics": {}} | members))
    planned = terraform(tmp_path, "plan", "-input=false", "-out=plan")
    assert planned.returncode == 0, planned.stderr
    output = json.loads(terraform(tmp_path, "show", "-json", "plan").stdout)["planned_values"]["outputs"]["roles"]
    found = sorted((each["member"].rpartition("/")[2], each["role"]) for each in output["value"].values())
    assert found == [
        ("a", "outbox_application"),
        ("b", "outbox_application"),
        ("c", "outbox_operator"),
        ("c", "outbox_viewer"),
        ("outbox-console", "outbox_viewer"),
        ("publishworker", "publishworker"),
    ]
