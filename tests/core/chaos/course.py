"""The course of one run: a world, a thread for each lane of its faults, and the checks during the run and at its
end."""

from __future__ import annotations

import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from kvframework.errors import KVFrameworkError
from tests.core.chaos.faults import Faults
from tests.core.chaos.ledger import Ledger
from tests.core.chaos.rest import check_end, check_logs, check_nothing_left, check_rest
from tests.core.chaos.schedule import LANES, OF_L2, Fault, Lane, draw
from tests.core.chaos.world import Footprint, Plan, World

_WARM_S = 10.0
_LONGER_S = 90.0
_LOOK_EVERY_S = 0.5
_LOG_LINES = 30


class Broken(AssertionError):
    """A broken promise. The text names it, the faults before it, and the command that repeats the run."""


class Course:
    """One run; `run()` may be called once. `show` is called with each fault that begins."""

    def __init__(
        self, plan: Plan, lanes: Sequence[Lane] = LANES, show: Callable[[Fault], object] = lambda _: None
    ) -> None:
        self.ledger = Ledger()
        self._plan = plan
        lanes = [lane for lane in lanes if plan.l2 or lane.name not in OF_L2]
        self._schedule = draw(plan.seed, plan.seconds, lanes)
        self._show = show
        self._begun: list[Fault] = []
        self._over = threading.Event()
        self._warm: dict[int, Footprint] = {}

    def run(self) -> Ledger:
        """Run to the end and return the ledger. Raises `Broken`."""
        log = ""
        with tempfile.TemporaryDirectory(prefix="kvf-chaos-") as folder:
            world = World(self._plan, Path(folder), self.ledger)
            try:
                with world:
                    try:
                        self._live(world)
                    finally:
                        log = world.server.log
                check_nothing_left(world.mark)
            except AssertionError as error:
                self.ledger.violate(str(error))
            except Exception:  # noqa: BLE001  any error means that the run has failed
                self.ledger.violate(traceback.format_exc())
        if self.ledger.violation:
            raise Broken(self._account(log))
        return self.ledger

    def _live(self, world: World) -> None:
        began = time.monotonic()
        faults = Faults(world, self._over.wait)
        names = sorted({fault.lane for fault in self._schedule})
        lanes = [threading.Thread(target=self._lane, args=(name, faults, began), name=name) for name in names]
        for lane in lanes:
            lane.start()
        try:
            while not self._enough(time.monotonic() - began) and not self.ledger.failed.wait(_LOOK_EVERY_S):
                self._note_footprint(world)
        finally:
            self._over.set()
            for lane in lanes:
                lane.join()
        if not self.ledger.failed.is_set():
            self._end(world)

    def _end(self, world: World) -> None:
        for engine in world.engines:
            engine.ask_to_stop()
        for number, engine in enumerate(world.engines):
            problem = engine.join()
            assert not problem, f"engine {number} {problem}"
        world.witness.close()
        self.ledger.check_silences()
        check_rest(world)
        last = Footprint(world.server.pid)
        last.check_flat(self._warm.get(last.pid, last), descriptors=world.descriptors)
        check_end(world)
        check_logs(world)
        assert self._has_proven(), f"nothing was proven: {dict(self.ledger.tally)}"

    def _enough(self, seconds: float) -> bool:
        """Whether the run may end; on a busy machine it continues until something was proven."""
        return seconds >= self._plan.seconds + (0.0 if self._has_proven() else _LONGER_S)

    def _has_proven(self) -> bool:
        return all(self.ledger.tally[name] for name in ("loads", "claims_held"))

    def _lane(self, name: str, faults: Faults, began: float) -> None:
        for fault in (fault for fault in self._schedule if fault.lane == name):
            if self._over.wait(max(began + fault.at - time.monotonic(), 0.0)):
                return
            self._begun.append(fault)
            self._show(fault)
            try:
                faults.run(fault)
            except AssertionError as error:
                self.ledger.violate(f"in {fault.kind}: {error}")
            except Exception:  # noqa: BLE001  any error means that the run has failed
                self.ledger.violate(f"in {fault.kind}: {traceback.format_exc()}")

    def _note_footprint(self, world: World) -> None:
        """Record the footprint of each server once, when it is warm."""
        if world.server.process is None or (not world.plan.held and world.server.pid in self._warm):
            return
        try:
            server = world.status()["server"]
            if server["uptime_s"] >= _WARM_S and server["pid"] not in self._warm:
                self._warm[server["pid"]] = Footprint(server["pid"])
        except (KVFrameworkError, OSError):  # the server is down at the moment
            return

    def _account(self, log: str) -> str:
        plan = self._plan
        options = f"--seed {plan.seed} --seconds {plan.seconds:g} --engines {plan.engines}"
        options += ("" if plan.l2 else " --no-l2") + (f" --bug {plan.bug}" if plan.bug else "")
        return "\n".join(
            [
                self.ledger.violation,
                f"seed {plan.seed}; the faults so far:",
                *map(str, self._begun),
                f"seen: {dict(self.ledger.tally)}",
                "the end of the server's log:",
                *log.splitlines()[-_LOG_LINES:],
                self.ledger.violation,
                f"again: python -m tests.core.chaos.run {options}",
            ]
        )
