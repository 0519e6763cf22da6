"""The bench of what observation costs: with real servers and watchers, and tiny sizes. No figure is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tests.test_commands import SPREAD, document, stopped
from kvframework.client import LookupResult, SchedulerAdapter
from kvframework_bench.errors import BenchFailed, BenchUnavailable
from kvframework_bench.observe.prompts import lookup_cases
from kvframework_bench.observe.run import Sizes, bench_observe
from kvframework_bench.observe.watcher import following, scraping
from kvframework_bench.process import scratch
from kvframework_bench.server import RunningServer, running_server, status

pytest.importorskip("h11")

CAPACITY = 2 << 20
STATES = ["none", "none, again", "scraped", "explained", "ghosts", "all of it"]
KINDS = ("hit", "miss, never stored", "miss, evicted")


def answered(server: RunningServer, request: str) -> int:
    with server.client() as client:
        return sum(status(client)["requests"][request]["counts"])


def test_the_command_has_every_lookup_in_every_state() -> None:
    figures = document("observe", "--seconds", "0", "--rounds", "1", "--seed", "7")
    assert (figures["seed"], figures["rounds"], figures["seconds"]) == (7, 1, 0.0)
    lookups = [f"{k}k tokens, {kind}" for k in (1, 8) for kind in KINDS]
    rows = [(row["lookup"], row["state"]) for row in figures["lookups"]]
    assert rows == [(each, state) for each in lookups for state in STATES]
    for row in figures["lookups"]:
        assert row["latency"]["samples"] >= 1
        assert set(row["p50_ratio"]) == set(row["p99_ratio"]) == SPREAD
        if row["state"] == "none":
            assert set(row["p50_ratio"].values()) == set(row["p99_ratio"].values()) == {1.0}
    # Once for the state of its own, and once for all of it.
    assert (figures["scrapes"], figures["follows"]) == (2, 2)
    without, again, default = figures["memory"]
    assert without["ghosts"] == again["ghosts"] == without["ghost_bytes"] == 0 < default["ghost_bytes"]
    assert all(row["at_rest"]["anon"] > 0 and row["at_end"]["anon"] > 0 for row in figures["memory"])


def test_lookups_miss_what_was_evicted_and_what_was_never_stored() -> None:
    with scratch() as directory, running_server(directory, CAPACITY) as server, server.client() as client:
        cases = lookup_cases(client, CAPACITY, seed=1)
        before = status(client)["lookups"]["misses"]
        for case in cases.values():
            case()
        after = status(client)["lookups"]["misses"]
    grown = {reason: count - before[reason] for reason, count in after.items() if count != before[reason]}
    assert grown == {"evicted": 2, "never_stored": 2}


def test_a_watcher_watches_when_it_is_asked_to_and_at_no_other_time() -> None:
    with scratch() as directory, running_server(directory, CAPACITY) as server:
        with scraping("a", server.endpoint, directory) as scrape, following("a", server.endpoint, directory) as follow:
            observing = scrape._observing
            assert observing is not None
            assert stopped(observing.pid)
            explained = []
            for _ in range(3):
                for watcher in (scrape, follow):
                    watcher.begin()
                    watcher.ask()
                    watcher.end()
                assert stopped(observing.pid)
                explained.append(answered(server, "RECENT"))
            assert scrape.asked == follow.asked == 3
            # Before the first there is one more, of where to begin.
            assert explained == [2, 3, 4]
        assert not Path(f"/proc/{observing.pid}").exists()


def test_a_wrong_answer_makes_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerAdapter, "lookup", lambda *_args: LookupResult(0))
    with pytest.raises(BenchFailed, match="a lookup found 0 tokens"):
        bench_observe(Sizes(rounds=1, seconds=0.0))


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(BenchUnavailable, match="not installed: h11"):
        bench_observe()
