"""The effect of each kind of fault on a world. The thread of its lane calls it; it returns when the fault is over."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from kvf_filesystem.form import path_of
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from tests.core.chaos.process import EngineProcess
from tests.core.chaos.schedule import Fault
from tests.core.chaos.strangers import STRANGERS
from tests.core.chaos.world import World
from tests.core.tiers.damage import KINDS, damage_in_folder, damage_in_redis

REDIS, DISK = 0, 1
DAMAGED = 20
# Bound until status shows that a tier is down, or up again: its breaker retries after 2 s at most.
TOLD_S = 60.0
# Wire faults under which no request succeeds.
OUTAGES = {"wire_refuse", "wire_stall", "wire_reset"}


class Faults:
    """`ended` waits for the end of the run, which cuts a fault short."""

    def __init__(self, world: World, ended: Callable[[float], bool]) -> None:
        self._world = world
        self._ended = ended

    def run(self, fault: Fault) -> None:
        chance = random.Random(fault.number)
        if fault.lane == "strangers":
            self._stranger(fault.kind, chance)
        elif fault.kind.startswith("wire_"):
            self._wire(fault.kind, fault.seconds)
        else:
            getattr(self, f"_{fault.kind}")(fault.seconds, chance)

    def _stranger(self, kind: str, chance: random.Random) -> None:
        began = time.monotonic()
        ledger = self._world.ledger
        try:
            with ledger.work(kind):
                STRANGERS[kind](self._world.server.endpoint, chance)
        except (KVFrameworkError, OSError):
            if not ledger.explained(("kill_server", "stop_server"), began, time.monotonic()):
                raise

    # engines

    def _kill_engine(self, seconds: float, chance: random.Random) -> None:
        number = chance.randrange(len(self._world.engines))
        engine = self._world.engines[number]
        with self._work("kill_engine", engine.kill9, engine.start, number):
            self._ended(seconds)

    def _stop_engine(self, seconds: float, chance: random.Random) -> None:
        number = chance.randrange(len(self._world.engines))
        self._stop("stop_engine", [self._world.engines[number]], seconds, number)

    def _stop_all_engines(self, seconds: float, chance: random.Random) -> None:
        self._stop("stop_all_engines", self._world.engines, seconds)

    def _stop(self, kind: str, engines: list[EngineProcess], seconds: float, number: int | None = None) -> None:
        def tell(signum: int) -> None:
            for engine in engines:
                engine.signal(signum)

        with self._work(kind, partial(tell, signal.SIGSTOP), partial(tell, signal.SIGCONT), number):
            self._ended(seconds)

    # the server

    def _kill_server(self, seconds: float, chance: random.Random) -> None:
        with self._work("kill_server", self._world.server.kill9, self._world.server.start):
            self._ended(seconds)

    def _stop_server(self, seconds: float, chance: random.Random) -> None:
        with self._work("stop_server", self._world.server.sigstop, self._world.server.sigcont):
            self._ended(seconds)

    def _clear(self, seconds: float, chance: random.Random) -> None:
        with self._work("clear"), self._world.server.client() as client:
            client.call("CLEAR", m.Clear())

    # Redis

    def _kill_redis(self, seconds: float, chance: random.Random) -> None:
        with self._work("kill_redis", self._world.redis.kill9, self._world.redis.start, heals=REDIS):
            self._down(seconds)

    def _stop_redis(self, seconds: float, chance: random.Random) -> None:
        with self._work("stop_redis", self._world.redis.sigstop, self._world.redis.sigcont, heals=REDIS):
            self._down(seconds)

    def _flush_redis(self, seconds: float, chance: random.Random) -> None:
        with self._work("flush_redis"), self._world.redis.client() as client:
            client.flushall()

    def _damage_redis(self, seconds: float, chance: random.Random) -> None:
        with self._work("damage_redis"), self._world.redis.client() as client:
            keys = list(client.scan_iter(match=b"kvf:*", count=1000))
            for _ in range(min(DAMAGED, len(keys))):
                damage_in_redis(client, chance.choice(KINDS), chance.choice(keys), chance.choice(keys), chance)

    def _wire(self, kind: str, seconds: float) -> None:
        begin = partial(self._world.proxy.inject, kind.removeprefix("wire_"))
        with self._work(kind, begin, self._world.proxy.heal, heals=REDIS):
            (self._down if kind in OUTAGES else self._ended)(seconds)

    # the disk

    def _slow_disk(self, seconds: float, chance: random.Random) -> None:
        slow = partial(self._world.set_slowness, chance.choice((0.01, 0.1, 2.0)))
        with self._work("slow_disk", slow, partial(self._world.set_slowness, 0.0), heals=DISK):
            self._ended(seconds)

    def _damage_disk(self, seconds: float, chance: random.Random) -> None:
        with self._work("damage_disk"):
            keys = [bytes.fromhex(path.name) for path in self._world.disk.glob("??/*") if _is_value(path)]
            for _ in range(min(DAMAGED, len(keys))):
                # An object that was evicted or damaged in the meantime may not allow this damage.
                with suppress(OSError, ValueError):
                    pair = chance.sample(keys, 2)
                    if not any((self._world.disk / path_of(key)).is_symlink() for key in pair):
                        damage_in_folder(self._world.disk, chance.choice(KINDS), *pair, chance)

    @contextmanager
    def _work(
        self,
        kind: str,
        begin: Callable[[], object] = lambda: None,
        end: Callable[[], object] = lambda: None,
        engine: int | None = None,
        heals: int | None = None,
    ) -> Iterator[None]:
        """A fault from `begin` to `end`, of one engine or all; status must show then that the tier `heals` works."""
        with self._world.ledger.work(kind, engine):
            begin()
            try:
                yield
            finally:
                end()
            if heals is not None:
                self._await_state(heals, "closed")

    # what status must show

    def _down(self, seconds: float) -> None:
        """Wait for the outage; status must show one that lasts over a second."""
        if seconds > 1.0:
            self._await_state(REDIS, "down")
        self._ended(seconds)

    def _await_state(self, tier: int, wanted: str) -> None:
        """Wait until status shows `wanted`: "closed", or "down" for any other state."""

        deadline = time.monotonic() + TOLD_S
        while not self._ended(0.1):
            now = time.monotonic()
            try:
                if (self._world.status()["l2"][tier]["state"] == "closed") == (wanted == "closed"):
                    return
            except (KVFrameworkError, OSError):  # the server is down as well
                deadline = now + TOLD_S
            if self._world.ledger.explained(("kill_server",), now, now):
                deadline = now + TOLD_S
            assert now < deadline, f"status does not show tier {tier} as {wanted} within {TOLD_S} s"


def _is_value(path: Path) -> bool:
    return not path.is_symlink() and not path.name.startswith(".")
