"""The figures of shards: that they are printed, and that every byte is right."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.tests.test_commands import SPREAD, document
from kvframework_bench.errors import BenchFailed

pytest.importorskip("torch")


def test_the_figures_of_shards() -> None:
    figures = document("shards")
    assert [(row["tp"], row["shards"]) for row in figures["rows"]] == [(4, 2), (4, 2)]
    assert all(set(row[way]) == SPREAD for row in figures["rows"] for way in ("store", "load"))


def test_an_engine_that_holds_no_whole_shards_is_refused() -> None:
    from kvframework_bench.shards.run import QUICK, bench_shards

    with pytest.raises(BenchFailed, match="an engine of 3 ranks holds no whole shards"):
        bench_shards(msgspec.structs.replace(QUICK, sizes=(3,)))
