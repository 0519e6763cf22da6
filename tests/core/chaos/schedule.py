"""The schedule of faults: a pure function of the seed, fixed before any process starts.

Faults lie in lanes. The faults of a lane are sequential; the lanes overlap, so a server may be killed while its Redis
stalls and an engine is stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvf_dev.testing.faults import WIRE_FAULTS

SHORT_S, LONG_S = (0.05, 0.5), (2.5, 5.0)  # below and above the leases of these servers
FIRST_S = 2.0


@dataclass(frozen=True)
class Kind:
    """A kind of fault, and the ranges of its least duration; one range is drawn at random."""

    name: str
    lasts: Sequence[tuple[float, float]] = ((0.0, 0.0),)
    ends_server: bool = False


@dataclass(frozen=True)
class Lane:
    name: str
    gap_s: tuple[float, float]  # from the end of one fault to the start of the next
    kinds: Sequence[Kind]


LANES = (
    Lane(
        "engines",
        (0.5, 3.0),
        (Kind("kill_engine", (SHORT_S,)), Kind("stop_engine", (SHORT_S, LONG_S)), Kind("stop_all_engines", (SHORT_S,))),
    ),
    Lane(
        "server",
        (1.0, 5.0),
        (
            Kind("kill_server", ((0.0, 0.0), LONG_S), ends_server=True),
            Kind("stop_server", (SHORT_S, LONG_S)),
            Kind("clear"),
        ),
    ),
    Lane(
        "redis",
        (0.5, 3.0),
        (
            Kind("kill_redis", ((0.0, 0.0), LONG_S)),
            Kind("stop_redis", (SHORT_S, LONG_S)),
            Kind("flush_redis"),
            Kind("damage_redis"),
            *(Kind(f"wire_{name}", (SHORT_S, LONG_S)) for name in sorted(WIRE_FAULTS)),
        ),
    ),
    Lane("disk", (0.5, 4.0), (Kind("slow_disk", (SHORT_S, LONG_S)), Kind("damage_disk"))),
    Lane(
        "strangers",
        (0.3, 2.0),
        (Kind("frames"), Kind("payloads"), Kind("half_open"), Kind("die_with_pins"), Kind("die_with_leases")),
    ),
)


OF_L2 = ("redis", "disk")


@dataclass(frozen=True)
class Fault:
    """A drawn fault. `at` is its start in seconds after the run's, if the earlier faults of its lane have ended.
    `number` seeds its remaining random choices: the engine, the bytes."""

    at: float
    lane: str
    kind: str
    seconds: float
    number: int

    def __str__(self) -> str:
        return f"{self.at:7.2f} s  {self.lane:9} {self.kind:16} {self.seconds:5.2f} s  {self.number}"


def draw(seed: int, seconds: float, lanes: Sequence[Lane] = LANES) -> list[Fault]:
    """Draw the faults, ordered by time. No server is killed in the second half, so that leaks in it show at the end."""
    faults = [fault for lane in lanes for fault in _of_lane(lane, random.Random(f"{seed}/{lane.name}"), seconds)]
    return sorted(faults, key=lambda fault: (fault.at, fault.lane))


def _of_lane(lane: Lane, chance: random.Random, seconds: float) -> Iterator[Fault]:
    at = FIRST_S + chance.uniform(0.0, lane.gap_s[1])
    bag: list[Kind] = []
    while True:
        # Each kind comes once before any comes again.
        bag = bag or chance.sample(lane.kinds, len(lane.kinds))
        kind = bag.pop()
        lasts = chance.uniform(*chance.choice(kind.lasts))
        number = chance.randrange(1 << 32)
        if at + lasts >= seconds:
            return
        if not (kind.ends_server and at >= seconds / 2):
            yield Fault(at, lane.name, kind.name, lasts, number)
            at += lasts
        at += chance.uniform(*lane.gap_s)
