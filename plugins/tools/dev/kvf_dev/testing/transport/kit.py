"""The base of the transport kit's tests: fixtures, and the check after every test that no mistake was noted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest

from kvf_dev.testing.kit import Kit
from kvf_dev.testing.transport.cases import GroupCase
from kvf_dev.testing.transport.engine import KitEngine
from kvf_dev.testing.transport.node import client_of, held_by, serving, status_of, wait_until
from kvf_dev.testing.transport.outcomes import failed_copies_noted, promise_of
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.client import KVClient
from kvframework.server import Server

MakeEngine = Callable[..., KitEngine]


class TransportKit(Kit):
    """Give a `spec` fixture. One server and one client serve all tests of a class."""

    # The longest that a submit may keep the engine's thread while its copy is held, in seconds.
    submit_budget_s = 0.05
    # The kit's patience for events that need no call, such as the restart of a copier, in seconds.
    patience_s: ClassVar[float] = 20.0

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls) -> Iterator[RigSpec]:
        """The recipe for the rig; the fixture ends the processes under it."""
        raise NotImplementedError("give a `spec` fixture of class scope")

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, spec: RigSpec) -> Iterator[TransportRig]:
        made = spec.make()
        yield made
        made.close()

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, rig: TransportRig) -> Iterator[Server]:
        with serving(rig) as running:
            yield running

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, rig: TransportRig, server: Server) -> Iterator[KVClient]:
        with client_of(rig, server.endpoint) as connected:
            yield connected

    @pytest.fixture(scope="class")
    @classmethod
    def numbers(cls) -> Iterator[int]:
        """Numbers that never repeat: instance ids, and seeds of content."""
        return itertools.count(1)

    @pytest.fixture
    def make_engine(self, rig: TransportRig, client: KVClient, numbers: Iterator[int]) -> Iterator[MakeEngine]:
        """Makes engines, and ends them with the test."""
        engines: list[KitEngine] = []

        def make(groups: Sequence[GroupCase], via: KVClient | None = None, **options: object) -> KitEngine:
            number = next(numbers)
            options.setdefault("seed", number)
            engine = KitEngine(rig, via or client, number, groups, **options)  # type: ignore[arg-type]
            engines.append(engine)
            return engine

        yield make
        for engine in engines:
            engine.close()

    @pytest.fixture(autouse=True)
    def nothing_is_wrong(self, rig: TransportRig, client: KVClient) -> Iterator[None]:
        """After every test: no pin and no reservation is left, and the device noted no mistake."""
        before = len(rig.problems())
        with failed_copies_noted(lambda: rig.problems()[before:]) as shown:
            yield
        wait_until(lambda: held_by(status_of(client)) == (0, 0), "the end of all pins and reservations")
        if (found := rig.problems()[before:]) and not shown():
            pytest.fail(f"no mistake is noted by the device: {promise_of(found[0])}", pytrace=False)

    def holding(self, rig: TransportRig) -> Entered:
        """`rig.holding_copies()`, or the test is skipped."""
        return self.entered(rig.holding_copies())

    def entered(self, context: AbstractContextManager[None]) -> Entered:
        """A context of the rig, or the test is skipped."""
        try:
            context.__enter__()
        except NotImplementedError as reason:
            pytest.skip(str(reason))
        return Entered(context)

    def needs_asynchronous(self, rig: TransportRig) -> None:
        if rig.synchronous:
            pytest.skip("the transport copies in the engine's thread: nothing is under way after a submit")


class Entered:
    """A context manager that has been entered already."""

    def __init__(self, context: AbstractContextManager[None]) -> None:
        self._context = context
        self._left = False

    def __enter__(self) -> Entered:
        return self

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._context.__exit__(None, None, None)

    def __exit__(self, *_exc: object) -> None:
        self.leave()
