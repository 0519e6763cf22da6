"""The figures of a router: that they are printed, and that nothing of what they compare is wrong."""

from __future__ import annotations

import pytest

from benchmarks.tests.test_commands import document

pytest.importorskip("h11")


def test_the_figures_of_a_router() -> None:
    figures = document("route")
    measured = {row["name"]: row["value"] for row in figures["measured"]}
    assert measured["blocks announced"] == measured["blocks in the full index"] == 16_384
    assert measured["announced blocks without room"] == 0
    assert 40 <= measured["memory of the index per block"] < 41
    assert measured["blocks announced in the room of removed blocks"] == 8192
    scores = [(row["tokens"], row["nodes"], row["having"]) for row in figures["scores"]]
    assert scores == [(1024, 2, 1), (8192, 2, 1), (32768, 2, 1), (32768, 3, 1), (32768, 3, 3)]
    assert all(0 < row["longest_step_ms"] <= row["whole_ms"] for row in figures["scores"])
    assert len(figures["thousand"]) == 6
