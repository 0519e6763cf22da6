"""`kvframework bench observe`: LOOKUPs of servers that are observed, explained, remember what left L1, or do not.

Three servers: two without ghosts, of which one is there to show the noise, and one with the default number of them.
What watches a server asks, or runs at all, only while a state of its own is measured.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvframework.api.installing import install_command
from kvframework.client import KVClient
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.observe.figures import AGAIN, NONE, ObservedLookup, ObserveFigures, ServerMemory
from kvframework_bench.observe.prompts import lookup_cases
from kvframework_bench.observe.watcher import Watcher, following, scraping
from kvframework_bench.process import scratch
from kvframework_bench.rounds import Case, Latency, Rounds, Spread, percentile, ratio
from kvframework_bench.server import Resident, RunningServer, resident, running_server, status

# Few objects fill it.
_ARENA_BYTES = 8 << 20
_ASK_EVERY_S = 1.0


class Sizes(msgspec.Struct, frozen=True):
    """Rounds, and the seconds of each state in each of them."""

    rounds: int = 20
    seconds: float = 2.0


FULL = Sizes()
QUICK = Sizes(rounds=2, seconds=0.2)


class _Server(NamedTuple):
    name: str
    running: RunningServer
    client: KVClient
    at_rest: Resident

    def memory(self) -> ServerMemory:
        ghosts = status(self.client)["l1"]["ghosts"]
        return ServerMemory(self.name, ghosts["most"], ghosts["bytes"], self.at_rest, resident(self.running.child.pid))


class _State(NamedTuple):
    cases: Mapping[str, Case]
    watchers: Sequence[Watcher] = ()


def bench_observe(sizes: Sizes = FULL, *, seed: int = 1, stage: Stage = no_progress) -> ObserveFigures:
    """Measure lookups and memory; takes four minutes. For the main thread. Raises `BenchFailed`, also when an answer is
    wrong, and `BenchUnavailable` without what `kvframework observe` needs."""
    if importlib.util.find_spec("h11") is None:
        raise BenchUnavailable("not installed: h11", hint=install_command(distribution="kvframework-observe"))
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        advance = stack.enter_context(stage("asking in every state", sizes.rounds))
        bare = _start(stack, directory, "without ghosts", ["l1.ghosts=0"])
        again = _start(stack, directory, "without ghosts, again", ["l1.ghosts=0"])
        default = _start(stack, directory, "with ghosts", [])
        servers = (bare, again, default)
        of_bare, of_again, of_default = (lookup_cases(each.client, _ARENA_BYTES, seed) for each in servers)
        scrape, scrape_all = (
            stack.enter_context(scraping(each.name, each.running.endpoint, directory)) for each in (bare, default)
        )
        follow, follow_all = (
            stack.enter_context(following(each.name, each.running.endpoint, directory)) for each in (bare, default)
        )
        states = {
            NONE: _State(of_bare),
            AGAIN: _State(of_again),
            "scraped": _State(of_bare, [scrape]),
            "explained": _State(of_bare, [follow]),
            "ghosts": _State(of_default),
            "all of it": _State(of_default, [scrape_all, follow_all]),
        }
        measured: dict[str, dict[str, list[list[float]]]] = {
            lookup: {state: [] for state in states} for lookup in of_bare
        }
        for index in range(sizes.rounds):
            for name, state in list(states.items())[:: -1 if index % 2 else 1]:
                for lookup, samples in _measure(state, sizes.seconds).items():
                    measured[lookup][name].append(samples)
            advance()
        return ObserveFigures(
            seed=seed,
            rounds=sizes.rounds,
            seconds=sizes.seconds,
            scrapes=scrape.asked + scrape_all.asked,
            follows=follow.asked + follow_all.asked,
            lookups=[
                _row(state, lookup, rounds, by_state[NONE])
                for lookup, by_state in measured.items()
                for state, rounds in by_state.items()
            ],
            memory=[server.memory() for server in servers],
        )


def _start(stack: ExitStack, directory: Path, name: str, settings: Sequence[str]) -> _Server:
    own = directory / name.replace(" ", "-")
    own.mkdir()
    running = stack.enter_context(running_server(own, _ARENA_BYTES, settings))
    client = stack.enter_context(running.client())
    return _Server(name, running, client, resident(running.child.pid))


def _measure(state: _State, seconds: float) -> dict[str, list[float]]:
    """Return the seconds of the lookups that end within so many seconds, and one of each at least."""
    for watcher in state.watchers:
        watcher.begin()
    samples: dict[str, list[float]] = {name: [] for name in state.cases}
    began = ask_at = time.perf_counter()
    while not samples[next(iter(samples))] or time.perf_counter() < began + seconds:
        if time.perf_counter() >= ask_at:
            ask_at += _ASK_EVERY_S
            for watcher in state.watchers:
                watcher.ask()
        for name, case in state.cases.items():
            samples[name].append(case())
    for watcher in state.watchers:
        watcher.end()
    return samples


def _row(state: str, lookup: str, rounds: Rounds, reference: Rounds) -> ObservedLookup:
    tails = zip(map(_p99, rounds), map(_p99, reference), strict=True)
    return ObservedLookup(
        state, lookup, Latency.of(rounds), ratio(rounds, reference), Spread.of([own / other for own, other in tails])
    )


def _p99(samples: Sequence[float]) -> float:
    return percentile(sorted(samples), 0.99)
