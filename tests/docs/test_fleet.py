"""The page on fleets: its TOML is the example's, its break-even follows from what stands beside it, and each failure of
the example is in its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvframework.config import load_config
from kvframework.errors import PluginUnavailable
from kvframework.registry import PluginRegistry, check_config
from tests.docs.shown import blocks
from tests.docs.test_sizing import models
from tests.support.doc_tables import rows

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "fleet"
PAGE = (ROOT / "docs" / "fleet.md").read_text()
NODES = sorted(EXAMPLE.glob("node_*.toml"))
BREAK_EVEN = [row for row in rows(PAGE, "Bandwidth and break-even") if "," in row[2]]
LONG_PROMPT = [row for row in rows(PAGE, "Bandwidth and break-even") if row not in BREAK_EVEN]
PLANES, EIGHT_BIT = 0.687, 0.5


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


@pytest.mark.parametrize("row", BREAK_EVEN, ids=lambda row: row[0])
def test_the_break_even_follows(row: list[str]) -> None:
    _, nbytes, prefill, *said = row
    tokens = int(prefill.split(" on ")[0].replace(",", ""))
    exact = int(nbytes) * tokens / 1e9
    assert said == [f"{exact:.2f}", f"{exact * 8:.0f}", f"{exact * PLANES:.2f}", f"{exact * EIGHT_BIT:.2f}"]


def test_a_model_has_the_bytes_that_sizing_gives_it() -> None:
    known = {model.name.partition("-")[2]: model.nbytes for model in models()}
    found = {row[0].partition("-")[2].partition(",")[0]: int(row[1]) for row in BREAK_EVEN}
    assert {"3.1-8B", "V3 (MLA)"} <= known.keys() & found.keys()
    assert {name: found[name] for name in known.keys() & found.keys()} == {
        name: known[name] for name in known.keys() & found.keys()
    }


@pytest.mark.parametrize("row", LONG_PROMPT, ids=lambda row: row[0])
def test_the_times_of_a_long_prompt_follow(row: list[str]) -> None:
    named, nbytes, computing, *networks = row
    model = named.partition(",")[0]
    per_token, tokens = next(
        (int(each[1]), int(each[2].split(" on ")[0].replace(",", ""))) for each in BREAK_EVEN if each[0] == model
    )
    exact = 32768 * per_token
    assert nbytes == f"{exact / 1e9:.2f} GB"
    assert computing == f"{32768 / tokens:.2f} s"
    assert networks == [f"{exact * 8 / (gbits * 0.9e9):.2f} s" for gbits in (10, 25, 100, 400)]


def test_there_are_as_many_rows_as_the_page_speaks_of() -> None:
    assert (len(BREAK_EVEN), len(LONG_PROMPT)) == (6, 3)


def test_each_failure_of_the_example_has_its_row_and_its_figures() -> None:
    program = (EXAMPLE / "fleet.py").read_text()
    failures = re.findall(r'^    "(.+)": Fleet\.\w+,$', program, re.MULTILINE)
    assert len(failures) == 8
    assert [row[0] for row in rows(PAGE, "What a failure costs")] == failures
    assert re.search(r"^\d+ requests in \d+ s, 0 errors, 0 wrong elements, 0 corrupt values$", PAGE, re.MULTILINE)
