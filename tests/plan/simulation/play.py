"""Plays scripts of actions against a world, and shortens those that break it.

A script is a list of (action, number): whatever chance an action has comes from its number, and what cannot be done is
passed over. So any part of a script is a script.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from unittest import mock

from kvframework.storage.l2 import loading, prefetch, writer
from tests.plan.simulation.actions import ACTIONS, WEIGHTS, rest
from tests.plan.simulation.checks import check, glance
from tests.plan.simulation.dice import Dice
from tests.plan.simulation.model import Broken
from tests.plan.simulation.tier import TierBug
from tests.plan.simulation.world import World

CHECK_EVERY = 32
TRACE = 50
Script = list[tuple[str, int]]


@dataclass
class Failure:
    """`at` is the number of the turn; `trace` the last steps before it."""

    what: str
    at: int
    trace: list[str]


def draw(seed: int) -> Iterator[tuple[str, int]]:
    chance = random.Random(seed)
    names, weights = list(ACTIONS), list(WEIGHTS.values())
    while True:
        for name in chance.choices(names, weights, k=1024):
            yield name, chance.getrandbits(64)


class Play:
    def __init__(self, seed: int, check_every: int = CHECK_EVERY) -> None:
        self.world = World(seed)
        self.steps = 0
        self.turns = 0
        self.counts: Counter[str] = Counter()
        self._check_every = check_every
        self._trace: deque[tuple[int, str, str]] = deque(maxlen=TRACE)

    def turn(self, name: str, bits: int) -> None:
        world = self.world
        world.use(Dice(bits))
        self.turns += 1
        self._trace.append((self.turns, name, "..."))
        did = ACTIONS[name](world)
        if did is None:
            self._trace.pop()
            return
        self._trace[-1] = (self.turns, name, did)
        self.steps += 1
        self.counts[name] += 1
        glance(world)
        if self.steps % self._check_every == 0:
            check(world)

    def finish(self) -> None:
        rest(self.world)

    def trace(self) -> list[str]:
        return [f"{turn:>8} {name:<12} {did}" for turn, name, did in self._trace]


def play(seed: int, script: Iterable[tuple[str, int]], steps: int, check_every: int = CHECK_EVERY) -> Play | Failure:
    """Takes `steps` steps of the script, or as many as it has, then lets everything come to rest."""
    with surroundings() as errors:
        game = Play(seed, check_every)
        try:
            for name, bits in script:
                game.turn(name, bits)
                if errors:
                    raise Broken(f"an error was logged: {errors[0]}")
                if game.steps >= steps:
                    break
            game.finish()
        except Broken as broken:
            return Failure(str(broken), game.turns, game.trace())
        finally:
            for job in game.world.jobs:
                job.abandon()
        return game


def shorten(seed: int, script: Script, what: str, most_turns: int = 400_000) -> Script:
    """A part of `script`, as short as a bounded search finds, that breaks the same. Checked after every step, so that
    it ends where it breaks."""
    left = most_turns

    def breaks(candidate: Script) -> int:
        nonlocal left
        left -= len(candidate)
        outcome = play(seed, candidate, len(candidate) + 1, check_every=1)
        return outcome.at if isinstance(outcome, Failure) and outcome.what == what else 0

    for tail in (100, 400, 1600, 6400):
        if tail < len(script) and breaks(script[-tail:]):
            script = script[-tail:]
            break
    size = len(script) // 2
    while size and left > 0:
        first = 0
        while first < len(script) and left > 0:
            candidate = script[:first] + script[first + size :]
            ends = breaks(candidate)
            if ends:
                script = candidate[:ends]
            else:
                first += size
        size //= 2
    return script


def report(seed: int, failure: Failure) -> str:
    """What to read after a failure: how to see it again, and the shortest script that was found."""
    drawn = draw(seed)
    script = [next(drawn) for _ in range(failure.at)]
    short = shorten(seed, script, failure.what)
    again = play(seed, short, len(short) + 1, check_every=1)
    lines = again.trace if isinstance(again, Failure) and again.what == failure.what else []
    told = [f"seed {seed}, turn {failure.at}: {failure.what}", "the last steps:", *failure.trace]
    return "\n".join([*told, f"shortened to {len(short)} turns, of which the last are:", *lines, repr(short)])


@contextlib.contextmanager
def surroundings() -> Iterator[list[str]]:
    """Small bounds, so that they are met; and no log: what comes with a traceback is collected, since it is a bug."""
    errors: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and not isinstance(record.exc_info[1], TierBug):
                errors.append(logging.Formatter().format(record))

    log = logging.getLogger("kvframework.storage")
    level, propagate = log.level, log.propagate
    handler = Collect(logging.ERROR)
    log.addHandler(handler)
    log.setLevel(logging.ERROR)
    log.propagate = False
    with contextlib.ExitStack() as stack:
        stack.callback(log.removeHandler, handler)
        stack.callback(log.setLevel, level)
        stack.callback(setattr, log, "propagate", propagate)
        for module, name, value in (
            (writer, "BATCH_OBJECTS", 4),
            (writer, "BATCH_BYTES", 20_000),
            (writer, "TOUCH_AT_ONCE", 3),
            (loading, "BATCH_OBJECTS", 3),
            (loading, "BATCH_BYTES", 25_000),
            (prefetch, "MAX_TASKS", 5),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield errors
