"""The page on fleets: its TOML is the example's, and each failure of the example is in its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvframework.config import load_config
from kvframework.errors import PluginUnavailable
from kvframework.registry import PluginRegistry, check_config
from tests.docs.shown import blocks
from tests.support.doc_tables import rows

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "fleet"
PAGE = (ROOT / "docs" / "fleet.md").read_text()
NODES = sorted(EXAMPLE.glob("node_*.toml"))


@pytest.mark.parametrize("file", NODES, ids=lambda file: file.name)
def test_a_nodes_toml_is_accepted(file: Path) -> None:
    try:
        check_config(load_config(file, environ={}), PluginRegistry())
    except PluginUnavailable as error:
        pytest.skip(str(error))


def test_nodes_differ_in_their_own_address_alone() -> None:
    lines = [[line for line in file.read_text().splitlines() if not line.startswith("#")] for file in NODES]
    listed = [re.search(r'^peers = \["(.+)", "(.+)"\]$', file.read_text(), re.MULTILINE) for file in NODES]
    differing = [pair for pair in zip(*lines, strict=True) if len(set(pair)) > 1]
    assert listed[0] is not None
    assert differing == [tuple(f'listen = "{address}"' for address in listed[0].groups())]


def test_the_page_shows_node_a_as_it_is() -> None:
    assert blocks(PAGE, "toml") == [(EXAMPLE / "node_a.toml").read_text()]


def test_each_failure_of_the_example_has_its_row_and_its_figures() -> None:
    program = (EXAMPLE / "fleet.py").read_text()
    failures = re.findall(r'^    "(.+)": Fleet\.\w+,$', program, re.MULTILINE)
    assert len(failures) == 8
    assert [row[0] for row in rows(PAGE, "What a failure costs")] == failures
    assert re.search(r"^\d+ requests in \d+ s, 0 errors, 0 wrong elements, 0 corrupt values$", PAGE, re.MULTILINE)
