"""The tables of every bench on a terminal of 80 columns: nothing is cut off, nothing is left out."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from rich.console import Console, RenderableType

from benchmarks.tests.test_plot import FIGURES, document
from kvframework.api.console import WideTable
from kvframework_bench.command import _WIDTH
from kvframework_bench.console import skipped_table
from kvframework_bench.errors import Skipped
from kvframework_bench.tables import tables


def lines(renderable: RenderableType, width: int) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("bench", sorted(FIGURES.keys() - {"host"}))  # its figures there are empty
def test_a_terminal_of_80_columns_shows_every_figure(bench: str) -> None:
    for table in tables(document(bench)):
        narrow = lines(WideTable(table), 80)
        assert max(map(len, narrow)) <= 80
        assert "…" not in "".join(narrow)
        shown, wide = (Counter(re.findall(r"[^\s─]+", "\n".join(each))) for each in (narrow, lines(table, 400)))
        assert not wide - shown


def test_what_was_skipped_is_told_whole() -> None:
    told = Skipped("mooncake", "a reason " * 40, 'pip install "DIR-OF-CLONE[mooncake]"')
    shown = "\n".join(lines(skipped_table([told]), _WIDTH))
    assert all(part.strip() in shown for part in (told.what, told.reason, told.hint))


def test_a_table_that_fits_stays_one() -> None:
    for table in tables(document("store")):
        assert lines(WideTable(table), 400) == lines(table, 400)
