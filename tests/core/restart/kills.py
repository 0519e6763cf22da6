"""A run of kills: engines store and load, are stopped, killed and started; their server is killed at moments that
follow from the seed and from the progress of all. Nothing is in a tier, so every hit after a kill is one of the kept
L1."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from kvframework.api.keys import CacheKey
from kvframework.errors import KVFrameworkError
from tests.core.chaos.course import Course
from tests.core.chaos.witness import FEW_EVICTIONS
from tests.core.chaos.world import Plan, World
from tests.support.held_server import HeldServer
from tests.support.processes import busy_s, has_ended
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

PATIENCE_S = 120.0
# So few that what the harness has just loaded is not evicted.
MOST_TURNS = 20
# One more in a row, and the next start is cold.
MOST_SHORT = 2
START_CPU_S = 0.8
KEEPSAKE = [1] * 512
# A range of 2 MiB, into which objects of the engines fit.
LATE_TOKENS = 64 * 256


class Kills(Course):
    """`run()` kills the server `kills` times. The ledger counts the moments, and the hits on what was stored before."""

    def __init__(self, seed: int, kills: int, *, bug: str = "") -> None:
        super().__init__(Plan(seed, 0.0, l2=False, held=True, bug=bug), lanes=())
        self._chance = random.Random(f"{seed}/kills")
        self._kills = kills
        self._short = 0
        self._last = 0

    def _live(self, world: World) -> None:
        assert isinstance(world.server, HeldServer)
        self._server = world.server
        for number in range(self._kills):
            moment = self._moment()
            self.ledger.count(**{moment: 1})
            try:
                self._round(world, moment)
            except AssertionError as error:
                raise AssertionError(f"kill {number}, {moment}: {error}") from error
            if self.ledger.failed.is_set():
                return
        until = time.monotonic() + PATIENCE_S
        while not self._has_proven() and time.monotonic() < until and not self.ledger.failed.is_set():
            self._progress(1)
        if not self.ledger.failed.is_set():
            self._end(world)

    def _moment(self) -> str:
        """What the server does at its end: it works, it has just begun to, it starts; or how it ends in order."""
        short = self._short < MOST_SHORT and self._chance.random() < 0.3
        longer = self._chance.choice(("working",) * 6 + ("stopped", "reloaded"))
        moment = self._chance.choice(("young", "starting")) if short else longer
        self._short = self._short + 1 if short else 0
        return moment

    def _round(self, world: World, moment: str) -> None:
        pid = self._next()
        if moment in ("working", "stopped", "reloaded"):
            self._server.serving(0)
            self._server.has_served()
            self._progress(self._chance.randint(0, MOST_TURNS))
        elif moment == "young":
            self._server.serving(0)
        else:
            least = self._chance.uniform(0.0, START_CPU_S)
            wait_until(lambda: busy_s(pid) >= least or self._serves(pid), PATIENCE_S, "the start")
        serves = moment in ("working", "stopped", "reloaded")
        late = self._late_writer() if serves and self._chance.random() < 0.3 else nullcontext()
        with late, self._engines(world), self.ledger.work("kill_server"):
            used = self._use_keepsake() if serves else None
            if moment == "reloaded":
                reply = self._server.keeper("reload")
                assert reply["done"], f"{reply}\n{self._server.log[-3000:]}"
            elif moment == "stopped":
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda: has_ended(pid), PATIENCE_S, "the end in order")
            else:
                self._server.signal9(pid)
            if self._chance.random() < 0.8:
                self._server.start()
        if self._chance.random() < 0.8:
            self._look(used)

    @contextmanager
    def _engines(self, world: World) -> Iterator[None]:
        """What becomes of the engines over the kill."""
        what = self._chance.choice(("work", "work", "one stopped", "all stopped", "one killed"))
        number = self._chance.randrange(len(world.engines))
        if what == "work":
            yield
        elif what == "one killed":
            with self.ledger.work("kill_engine", number):
                world.engines[number].kill9()
                yield
                world.engines[number].start()
        else:
            stopped = world.engines if what == "all stopped" else [world.engines[number]]
            kind = ("stop_all_engines",) if what == "all stopped" else ("stop_engine", number)
            with self.ledger.work(*kind):  # type: ignore[arg-type]
                for engine in stopped:
                    engine.signal(signal.SIGSTOP)
                try:
                    yield
                    if self._chance.random() < 0.5 and len(stopped) < len(world.engines):
                        # It comes back late: others have used what it might write.
                        self._progress(MOST_TURNS // 2)
                finally:
                    for engine in stopped:
                        engine.signal(signal.SIGCONT)

    @contextmanager
    def _late_writer(self) -> Iterator[None]:
        """A client that writes what it has reserved after the kill, when others have stored: the copies of the engines
        are too short for a kill to come between."""
        with self._server.client() as client:
            registered = client.register(1002, model_name="late")
            key = key_for(registered, [self.ledger.tally["late_writes"]] * LATE_TOKENS, model_name="late")
            plan = client.prepare_store(key, 1002)
            yield
            self._server.serving(0)
            self._progress(MOST_TURNS)
            client.write(plan, b"late")
            self.ledger.count(late_writes=1)

    def _progress(self, turns: int) -> None:
        begun = self.ledger.tally["turns"]
        wait_until(
            lambda: self.ledger.tally["turns"] >= begun + turns or self.ledger.failed.is_set(), PATIENCE_S, "the work"
        )

    def _next(self) -> int:
        """Return the process of the server after the killed one, from its start on."""
        wait_until(lambda: self._server.pid != self._last, PATIENCE_S, "the next server")
        self._last = self._server.pid
        return self._last

    def _serves(self, pid: int) -> bool:
        server = self._server.keeper()["server"]
        return bool(server is not None and server["pid"] == pid and server["ready"])

    # what outlives a kill

    def _use_keepsake(self) -> int | None:
        """Make the keepsake what the engines' objects evict last. Returns how many they had stored by then, None if the
        server did not answer."""
        with suppress(KVFrameworkError, OSError), self._server.client() as client:
            key = _keepsake(client)
            if self._loads(client, key) or client.store(key, b"kept", 1001) is not None:
                return self.ledger.tally["chunks_stored"]
        return None

    def _look(self, used: int | None) -> None:
        """Load the keepsake, `used` right before the kill. The engines that have worked since may have evicted it, from
        this server or from the one that a takeover has ended."""
        self._server.serving(0)
        with suppress(KVFrameworkError, OSError), self._server.client() as client:
            recovered = client.status()["l1"]["recovered"]
            assert recovered["why_cold"] == "", f"the server began empty: {recovered}"
            assert recovered["objects"] > 0, f"nothing came back: {recovered}"
            if self._loads(client, _keepsake(client)):
                self.ledger.count(keepsakes=1)
                return
            evictions = client.status()["l1"]["evictions"]
            stored = 0 if used is None else self.ledger.tally["chunks_stored"] - used
            few = used is not None and evictions < FEW_EVICTIONS and stored < FEW_EVICTIONS
            assert not few, f"LOST what was used right before; {evictions} evictions, {stored} chunks stored since"
            self.ledger.count(keepsakes_evicted=1)

    def _loads(self, client: WireClient, key: CacheKey) -> bool:
        found = client.retrieve(key, 1001)
        assert found is None or found == b"kept" * (len(found) // 4), "WRONG BYTES in what was stored before the kill"
        return found is not None


def _keepsake(client: WireClient) -> CacheKey:
    return key_for(client.register(1001, model_name="keepsake"), KEEPSAKE, model_name="keepsake")


SEED = int(os.environ.get("KVFRAMEWORK_CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
