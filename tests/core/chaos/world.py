"""The processes of a run: a server, its two tiers (a Redis behind a proxy, and a folder), and the engines.

One thread at a time drives each part; any thread may call `status`."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from kvf_dev.testing.faults import FaultProxy
from tests.core.chaos import server_program
from tests.core.chaos.events import AnyEvent, Claim, Settings
from tests.core.chaos.ledger import Ledger
from tests.core.chaos.process import EngineProcess, start_nursery
from tests.core.chaos.witness import Witness
from tests.support.held_server import HeldServer
from tests.support.processes import descriptors, own_bytes
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess

MARK = "KVFRAMEWORK_CHAOS_RUN"
L1 = "40MiB"  # some 320 objects, fewer than the engines use
ENGINES = 4
_START_S = 180.0
# The witness knows until when an object must be there by the order in which objects leave.
_ORDER = "l1.eviction.use=lru"
_SHORT = ("server.store_lease_s=2", "server.retrieve_lease_s=2", "server.ticket_s=3", "server.session_timeout_s=5")
_REDIS = ("--maxmemory", "48mb", "--maxmemory-policy", "allkeys-lru")


class Plan(msgspec.Struct, frozen=True):
    """The parameters of a run. `bug` names one of `server_program.BUGS`; with `held` a keeper has the server's L1."""

    seed: int
    seconds: float
    engines: int = ENGINES
    l2: bool = True
    bug: str = ""
    held: bool = False


# Connections of the tiers open and close; a leak with every client or request exceeds this.
SPARE_DESCRIPTORS = 24
SPARE_BYTES = 48 << 20


class Footprint:
    """The descriptors of a process, and its private memory (the arena is shared)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        open_files = descriptors(pid).values()
        # The filesystem tier keeps one of each of its 256 folders.
        folders = {file for file in open_files if re.search("/[0-9a-f]{2}$", file)}
        self.descriptors = len(open_files) - len(folders)
        self.bytes = own_bytes(pid)

    def check_flat(self, warm: Footprint, *, descriptors: int) -> None:
        """Compare with `warm`, an earlier footprint of the same process, and with `descriptors`, the number in an
        unused server."""
        grown = self.bytes - warm.bytes
        assert grown < SPARE_BYTES, f"the server grew by {grown >> 20} MiB from {warm.bytes >> 20} MiB"
        more = self.descriptors - descriptors
        assert more < SPARE_DESCRIPTORS, f"the server has {self.descriptors} descriptors, {more} more than at its start"


class World:
    """A context manager that ends every process it started."""

    def __init__(self, plan: Plan, folder: Path, ledger: Ledger) -> None:
        self.plan = plan
        self.ledger = ledger
        self.mark = secrets.token_hex(8)
        self.folder = folder
        self.disk = folder / "kv"
        self.redis = RedisServer(folder, options=_REDIS)
        self.engines: list[EngineProcess] = []
        self._slowness = folder / "slowness"
        self._stack = ExitStack()

    def __enter__(self) -> World:
        try:
            self._environment(MARK, self.mark)
            self._environment(server_program.SLOWNESS, str(self._slowness))
            self._environment(server_program.PLANT, self.plan.bug)
            kind = HeldServer if self.plan.held else ServerProcess
            self.server = kind(*self._settings(), capacity=L1, program=("-m", server_program.__name__))
            self._stack.enter_context(self.server)
            self.descriptors = Footprint(self.server.pid).descriptors  # before the first client
            start_nursery(MARK)
            self.witness = Witness(self.server.endpoint, self.ledger)
            self._stack.callback(self.witness.close)
            for number in range(self.plan.engines):
                self.engines.append(self._engine(number))
                self._stack.callback(self.engines[-1].kill9)
                self.engines[-1].start()
            for engine in self.engines:
                assert engine.has_reported.wait(_START_S), f"an engine does not start: {engine.log.read_text()}"
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def status(self) -> dict[str, Any]:
        """Query by a new client. Raises the errors of that client if the server is down."""
        with self.server.client(timeout=2.0) as client:
            return client.status()

    def set_slowness(self, seconds: float) -> None:
        if seconds:
            self._slowness.write_text(str(seconds))
        else:
            self._slowness.unlink(missing_ok=True)

    def _settings(self) -> list[str]:
        if not self.plan.l2:
            return [_ORDER, *_SHORT]
        self._stack.enter_context(self.redis)
        self.proxy = self._stack.enter_context(FaultProxy(("127.0.0.1", self.redis.port)))
        tables = (
            {"use": "redis", "url": f"redis://127.0.0.1:{self.proxy.port}/0", "timeout_s": 1},
            {"use": "filesystem", "path": self.disk, "capacity": "24MiB", "timeout_s": 1},
        )
        return [
            _ORDER,
            *_SHORT,
            *(f"l2.{at}.{name}={value}" for at, table in enumerate(tables) for name, value in table.items()),
        ]

    def _engine(self, number: int) -> EngineProcess:
        """Engines use two models, whose KV must never mix. One engine in three moves its bytes over the wire. One has
        short deadlines, like real engines; longer ones let the others work on a busy machine."""
        settings = Settings(
            endpoint=self.server.endpoint,
            seed=self.plan.seed,
            number=number,
            model=f"model {number % 2}",
            path="wire" if number % 3 == 2 else "auto",
            deadline_scale=0.5 if number == 0 else 5.0,
        )

        def report(event: AnyEvent) -> None:
            if isinstance(event, Claim):
                self.witness.ask(event)
            self.ledger.record(number, event)

        def died(text: str) -> None:
            self.ledger.violate(f"engine {number} {text}")

        return EngineProcess(settings, self.folder / f"engine-{number}.log", report, died)

    def _environment(self, name: str, value: str) -> None:
        os.environ[name] = value
        self._stack.callback(os.environ.pop, name, None)
