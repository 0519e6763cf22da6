"""The bench of a busy node: with a real server and few clients. No figure is asserted."""

from __future__ import annotations

from benchmarks.tests.test_commands import SPREAD, document


def test_the_command_has_every_way_of_answering() -> None:
    figures = document("node", "--quick", "--engines", "1", "--ranks", "2", "--rate", "100", "--seed", "7")
    assert (figures["engines"], figures["ranks"], figures["rate"], figures["seed"]) == (1, 2, 100.0, 7)
    assert [row["way"] for row in figures["rows"]] == [
        "bare echo",
        "all answered",
        "one way back",
        "granted",
        "by keys",
    ]
    for row in figures["rows"]:
        assert set(row["server_us"]) == set(row["cores"]) == set(row["ratio_to_echo"]) == SPREAD
        assert row["lookups"]["samples"] >= 1
    assert figures["rows"][0]["ratio_to_echo"]["median"] == 1.0
