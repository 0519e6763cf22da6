"""An engine process of these tests: turns over overlapping prompts, in an order that follows from the seed alone.

Arguments: the settings as JSON. It ends after `rounds` turns, or once its standard input ends, and prints its report as
one line of JSON. Any wrong byte or broken promise ends it with a traceback.
"""

from __future__ import annotations

import json
import random
import select
import sys
from dataclasses import asdict, dataclass, field

from tests.core.tiers.engine import Engine
from tests.core.tiers.prompts import Prompt, overlapping


@dataclass(frozen=True)
class Settings:
    endpoint: str
    seed: int
    instance_id: int
    rounds: int


@dataclass
class Report:
    rounds: int = 0
    chunks_asked: int = 0
    chunks_checked: int = 0
    chunks_stored: int = 0
    slowest_lookup_s: float = 0.0
    stored: list[int] = field(default_factory=list)  # indices of the prompts that it stored wholly


def run(engine: Engine, settings: Settings, report: Report) -> None:
    prompts = overlapping(settings.seed)
    chance = random.Random(f"{settings.seed}/{settings.instance_id}")
    stored = set()
    while report.rounds < settings.rounds and not _told_to_stop():
        chosen = chance.randrange(len(prompts))
        way = chance.choices(["turn", "abandon_lookup", "abandon_store"], [8, 1, 1])[0]
        prompt = prompts[chosen]
        if way == "turn":
            _turn(engine, prompt, report)
            stored.add(chosen)
        elif way == "abandon_lookup":
            engine.abandon_lookup(prompt)
        else:
            engine.abandon_store(prompt)
        report.rounds += 1
    report.slowest_lookup_s = engine.slowest_lookup_s
    report.stored = sorted(stored)


def _turn(engine: Engine, prompt: Prompt, report: Report) -> None:
    report.chunks_asked += len(prompt)
    report.chunks_checked += engine.load(prompt)
    outcome = engine.store(prompt)
    assert outcome.dropped == 0, f"a store was cut short: {outcome}"
    assert outcome.stored + outcome.present + outcome.in_flight == len(prompt), f"a store lost chunks: {outcome}"
    report.chunks_stored += outcome.stored


def _told_to_stop() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    report = Report()
    with Engine(settings.endpoint, instance_id=settings.instance_id) as engine:
        run(engine, settings, report)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
