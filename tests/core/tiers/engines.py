"""Engine processes: turns over overlapping prompts, in an order that follows from the seed alone.

As a program: the settings as JSON. It ends after `rounds` turns, or once its standard input has a line, and prints its
report as one line of JSON. Any wrong byte or broken promise ends it with a traceback."""

from __future__ import annotations

import random
import select
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from tests.core.tiers.engine import Engine
from tests.core.tiers.prompts import Prompt, overlapping
from tests.support.line_process import LineProcess

# 192 objects of these engines: less than they use, so that they need L2 all the time; more than they ever pin.
SMALL_L1 = "6MiB"
FOR_EVER = 1 << 40


class Settings(msgspec.Struct):
    endpoint: str
    seed: int
    instance_id: int
    rounds: int


class Report(msgspec.Struct):
    rounds: int = 0
    chunks_checked: int = 0
    slowest_lookup_s: float = 0.0
    stored: list[int] = []  # indices of the prompts that it stored wholly


class Engines:
    """One process for each of `endpoints`. Leaving the block ends what still runs."""

    def __init__(self, endpoints: Sequence[str], *, seed: int, rounds: int = FOR_EVER) -> None:
        self._stack = ExitStack()
        self._processes: list[LineProcess] = []
        for number, endpoint in enumerate(endpoints):
            settings = Settings(endpoint, seed, instance_id=100 + number, rounds=rounds)
            process = LineProcess("-m", __name__, msgspec.json.encode(settings).decode())
            self._processes.append(self._stack.enter_context(process))

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def check(self) -> None:
        assert all(each.process.poll() is None for each in self._processes), "an engine has ended"

    def stop(self) -> list[Report]:
        """Ends them after the turn that each is at; their reports."""
        for each in self._processes:
            each.tell()
        return self.finish()

    def finish(self) -> list[Report]:
        """Waits for their ends; their reports."""
        return [msgspec.json.decode(each.hear(), type=Report) for each in self._processes]


def run(engine: Engine, settings: Settings) -> Report:
    prompts = overlapping(settings.seed)
    chance = random.Random(f"{settings.seed}/{settings.instance_id}")
    report, stored = Report(), set()
    while report.rounds < settings.rounds and not select.select([sys.stdin], [], [], 0)[0]:
        chosen = chance.randrange(len(prompts))
        way = chance.choices(["turn", "abandon_lookup", "abandon_store"], [8, 1, 1])[0]
        if way == "turn":
            report.chunks_checked += turn(engine, prompts[chosen])
            stored.add(chosen)
        else:
            getattr(engine, way)(prompts[chosen])
        report.rounds += 1
    report.slowest_lookup_s = engine.slowest_lookup_s
    report.stored = sorted(stored)
    return report


def turn(engine: Engine, prompt: Prompt) -> int:
    """The chunks that were loaded, each byte of which was right."""
    loaded = engine.load(prompt)
    outcome = engine.store(prompt)
    assert outcome.dropped == 0, f"a store was cut short: {outcome}"
    assert outcome.stored + outcome.present + outcome.in_flight == len(prompt), f"a store lost chunks: {outcome}"
    return loaded


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    with Engine(settings.endpoint, instance_id=settings.instance_id) as engine:
        print(msgspec.json.encode(run(engine, settings)).decode())


if __name__ == "__main__":
    main()
