"""The bench of what telling routers costs: with real servers and tiny sizes. No figure is asserted."""

from __future__ import annotations

from benchmarks.tests.test_commands import SPREAD, document

SERVERS = ["none", "none, again", "events"]


def test_the_command_has_every_lookup_of_every_server() -> None:
    figures = document("events", "--seconds", "0", "--rounds", "2", "--seed", "7")
    assert (figures["seed"], figures["rounds"], figures["seconds"]) == (7, 2, 0.0)
    kinds = ("hit", "miss, never stored", "miss, evicted")
    lookups = [f"{k}k tokens, {kind}" for k in (1, 8) for kind in kinds]
    rows = [(row["lookup"], row["state"]) for row in figures["lookups"]]
    assert rows == [(each, server) for each in lookups for server in SERVERS]
    assert all(set(row["p50_ratio"]) == set(row["p99_ratio"]) == SPREAD for row in figures["lookups"])
    assert [cost["target_us"] for cost in figures["costs"]] == [3.0, 3.0, 0.0]
    assert figures["batches"] >= 1, "the server told nothing"
