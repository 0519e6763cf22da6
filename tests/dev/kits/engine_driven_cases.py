"""`cpu_gather` with one fault each, a line of `BUGS`, under the transport kit. Run by pytest outside of the repository;
all must fail."""
# ruff: noqa: ARG005  the arguments are those of the patched functions

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from kvf_cpu_gather import context, transfer_steps
from kvf_cpu_gather.engine_memory import Moves, RegisteredMemory
from kvf_cpu_gather.transfer_steps import TaskRunner, planned
from kvf_cpu_gather.wire_path import Staging, WirePath
from kvf_dev.testing import TransportConformance
from kvf_dev.testing.transport import RigSpec
from kvframework.errors import BadBlockIds

SHARED = memoryview(bytearray(1 << 20))


def commits_first(link: Any, transfer: Any, moves: Any, ready: Any) -> Any:
    with (yield from planned(link.prepare_store(transfer))) as plan:
        answer = plan.commit()
        moves.gather(plan.arena, plan.ranges)
        return (yield answer)


def publishes_what_failed(link: Any, transfer: Any, moves: Any, ready: Any) -> Any:
    with (yield from planned(link.prepare_store(transfer))) as plan:
        with contextlib.suppress(Exception):
            moves.gather(plan.arena, plan.ranges)
        return (yield plan.commit())


def keeps_its_ranges(link: Any, transfer: Any, moves: Any, ready: Any) -> Any:
    plan = yield from planned(link.prepare_store(transfer))
    moves.gather(plan.arena, plan.ranges)
    return (yield plan.commit())


def answers_a_hit(link: Any, transfer: Any, moves: Any, ready: Any, skip: int) -> Any:
    with (yield from planned(link.prepare_load(transfer))) as plan:
        with contextlib.suppress(Exception):
            moves.scatter(plan.arena, plan.ranges, skip)
        return (yield plan.commit())


def throws_late_answers_away(sent: Any) -> Any:
    if not sent.query():
        sent.cancel()
    return (yield sent)


def keeps_late_answers(sent: Any) -> Any:
    return (yield sent)


def first_memory(self: Any, caches: Any, right: Any = RegisteredMemory.of) -> Any:
    self.first = getattr(self, "first", None) or right(self, caches)
    return self.first


def half_of_the_wire(self: Any, transfer: Any, moves: Any, ready: Any, skip: int, right: Any = WirePath.load) -> Any:
    moves.scatter_each = lambda parts, skip: type(moves).scatter_each(moves, list(parts)[:16], skip)
    return right(self, transfer, moves, ready, skip)


def any_block(self: Any, transfer: Any, memory: Any, right: Any = Moves.__init__) -> None:
    with contextlib.suppress(BadBlockIds):
        right(self, transfer, memory)


# By bug: what is patched.
BUGS: dict[str, list[tuple[Any, str, Any]]] = {
    "CommitsFirst": [(context, "store_in_arena", commits_first)],
    "PublishesWhatFailed": [(context, "store_in_arena", publishes_what_failed)],
    "KeepsItsRanges": [(context, "store_in_arena", keeps_its_ranges)],
    "ThrowsLateAnswersAway": [(transfer_steps, "planned", throws_late_answers_away)],
    "KeepsLateAnswers": [(transfer_steps, "planned", keeps_late_answers)],
    "AnswersAHit": [(context, "load_from_arena", answers_a_hit)],
    "RemembersTheTensors": [(RegisteredMemory, "of", first_memory)],
    "LoadsHalfOfTheWire": [(WirePath, "load", half_of_the_wire)],
    "StagesInOnePlace": [
        (Staging, "take", lambda self, nbytes: SHARED[:nbytes]),
        (Staging, "give_back", lambda self, staged: None),
    ],
    "WritesAgainAfterAFailure": [
        (Staging, "take", lambda self, nbytes: SHARED[:nbytes]),
        (Staging, "give_back", lambda self, staged: None),
    ],
    "TakesAnyBlock": [(Moves, "__init__", any_block)],
    "LeavesItsThread": [(TaskRunner, "close", lambda self: None)],
}


def _tests_of(patches: list[tuple[Any, str, Any]]) -> type:
    class Planted(TransportConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def spec(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigSpec]:
            arguments = {"transport": "cpu_gather", "directory": str(tmp_path_factory.mktemp("rig"))}
            with pytest.MonkeyPatch.context() as patch:
                for owner, name, work in patches:
                    patch.setattr(owner, name, work)
                yield RigSpec("kvf_dev.testing.transport.rig:TorchRig", arguments)

    return Planted


for _name, _patches in BUGS.items():
    globals()[f"Test{_name}"] = _tests_of(_patches)
