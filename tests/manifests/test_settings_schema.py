"""The ConfigMaps, against the JSON Schema of the settings."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from outbox.program.settings import NAMES, PREFIX
from tests.manifests.rendering import OVERLAYS, ROOT, SPARK, rendered

SCHEMA: dict[str, Any] = json.loads((ROOT / "docs/reference/settings.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def test_the_schema_has_all_settings_and_accepts_their_defaults() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert {name.removeprefix(PREFIX) for name in SCHEMA["properties"]} == NAMES
    defaults = {name: each["default"] for name, each in SCHEMA["properties"].items() if "default" in each}
    assert len(defaults) > 25
    VALIDATOR.validate(defaults)


@pytest.mark.parametrize("folder", [*OVERLAYS.values(), SPARK], ids=lambda folder: folder.name)
def test_a_config_map_matches_the_schema(folder: Any) -> None:
    """Names and forms of the values. Variables of other programs are any text."""
    settings = [each["data"] for each in rendered(folder) if each["kind"] == "ConfigMap"]
    settings = [data for data in settings if any(name.startswith(PREFIX) for name in data)]
    assert len(settings) == 1
    VALIDATOR.validate(settings[0])
