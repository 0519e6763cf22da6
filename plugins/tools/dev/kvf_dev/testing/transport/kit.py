"""The base of the transport kit's tests: fixtures, and the check after every test that no mistake was noted."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest

from kvf_dev.testing.kit import Kit, wait_until
from kvf_dev.testing.transport.cases import NHD, GroupCase
from kvf_dev.testing.transport.engine import KitEngine, failed_copies_noted, promise_of
from kvf_dev.testing.transport.node import client_of, held_by, serving, status_of
from kvf_dev.testing.transport.programs import Program, endpoint_in
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.client import KVClient
from kvframework.server import Server

T = TypeVar("T")
MakeEngine = Callable[..., KitEngine]
SOON_S = 5.0


def or_skip(call: Callable[[], T]) -> T:
    """Return what a call of the rig returns; skip the test where the device cannot do that."""
    try:
        return call()
    except NotImplementedError as reason:
        pytest.skip(str(reason))


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

    @pytest.fixture
    def engine(self, make_engine: MakeEngine) -> KitEngine:
        return make_engine(NHD)

    @pytest.fixture
    def asynchronous(self, rig: TransportRig) -> None:
        if rig.synchronous:
            pytest.skip("the transport copies in the engine's thread: nothing is under way after a submit")

    @pytest.fixture(autouse=True)
    def nothing_is_wrong(self, rig: TransportRig, client: KVClient) -> Iterator[None]:
        """After every test: no pin and no reservation is left, and the device noted no mistake."""
        before = len(rig.problems())
        with failed_copies_noted(lambda: rig.problems()[before:]) as shown:
            yield
        wait_until(lambda: held_by(status_of(client)) == (0, 0), "the end of all pins and reservations")
        if (found := rig.problems()[before:]) and not shown():
            pytest.fail(f"no mistake is noted by the device: {promise_of(found[0])}", pytrace=False)

    @contextmanager
    def doomed(self, spec: RigSpec, rig: TransportRig) -> Iterator[tuple[Program, KVClient, KitEngine]]:
        """A server process for the test to kill, and an engine at it."""
        with tempfile.TemporaryDirectory(prefix="kvf-") as directory, ExitStack() as stack:
            server = Program("server", spec, endpoint_in(Path(directory)))
            stack.callback(server.close)
            client = stack.enter_context(client_of(rig, server.endpoint))
            engine = KitEngine(rig, client, 1, NHD, seed=1)
            stack.callback(engine.close)
            yield server, client, engine

    def holding(self, rig: TransportRig) -> ExitStack:
        """`rig.holding_copies()`, or the test is skipped. `close` of the result lets them go on."""
        return self.entered(rig.holding_copies())

    def entered(self, context: AbstractContextManager[None]) -> ExitStack:
        """A context of the rig, or the test is skipped."""
        stack = ExitStack()
        or_skip(lambda: stack.enter_context(context))
        return stack

    def must_be_given_back(self, client: KVClient, of: str) -> None:
        what = f"{of} to give its ranges and pins back"
        wait_until(lambda: held_by(status_of(client)) == (0, 0), what, SOON_S)
