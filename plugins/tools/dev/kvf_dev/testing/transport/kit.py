"""The base of the transport kit's tests: fixtures, and the check after every test that no mistake was noted."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import pytest

from kvf_dev.testing.kit import Kit, wait_until
from kvf_dev.testing.transport.cases import NHD, GroupCase
from kvf_dev.testing.transport.engine import KitEngine, registry_for
from kvf_dev.testing.transport.node import Program, client_of, endpoint_in, held_by, serving, status_of
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.api.futures import Future
from kvframework.api.plugin import Options
from kvframework.client import KVClient
from kvframework.server import Server

if TYPE_CHECKING:
    from kvf_devices import DeviceTransportProvider, EngineDriver

T = TypeVar("T")
MakeEngine = Callable[..., KitEngine]
Reads = Sequence[Callable[[], bytes | None]]
SOON_S = 5.0
_NUMBERS = itertools.count(1)


class TransportKit(Kit):
    """Give a `spec` fixture. One server and one client serve all tests of a class."""

    # Seconds for which a submit may keep the engine's thread while its copy is held, and for events that need no call.
    submit_budget_s = 0.05
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

    @pytest.fixture
    def make_engine(self, rig: TransportRig, client: KVClient) -> Iterator[MakeEngine]:
        """Make engines, and end them with the test."""
        with ExitStack() as stack:

            def make(groups: Sequence[GroupCase], **options: Any) -> KitEngine:
                number = next(_NUMBERS)
                engine = KitEngine(options.pop("rig", rig), client, number, groups, seed=number, **options)
                stack.callback(engine.close)
                return engine

            yield make

    @pytest.fixture
    def engine(self, make_engine: MakeEngine) -> KitEngine:
        return make_engine(NHD)

    @pytest.fixture(autouse=True)
    def nothing_is_wrong(self, rig: TransportRig, client: KVClient) -> Iterator[None]:
        """After every test: no pin and no reservation is left, and the device noted no mistake."""
        before = len(rig.problems())
        yield
        wait_until(lambda: held_by(status_of(client)) == (0, 0), "the end of all pins and reservations")
        if found := rig.problems()[before:]:
            pytest.fail(f"the device noted {found[0]}", pytrace=False)

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

    @contextmanager
    def in_mid_copy(
        self, rig: TransportRig, submit: Callable[[], Future[T]]
    ) -> Iterator[tuple[Future[T], Callable[[], None]]]:
        """A transfer whose copy stands still in its middle until the second value is called, or the block ends. Skips
        the test for a transport that copies in the engine's thread."""
        if rig.synchronous:
            pytest.skip("the transport copies in the engine's thread: nothing is under way after a submit")
        with ExitStack() as held:
            held.enter_context(rig.holding_copies())
            future = submit()
            wait_until(rig.held, "a copy that is held")
            yield future, held.close

    def must_go_on(self, reads: Reads) -> None:
        """Fail unless the streams of these reads come to them."""
        what = "the end of a stream's wait for a transfer that is over"
        wait_until(lambda: all(read() is not None for read in reads), what, self.patience_s)

    def must_be_given_back(self, client: KVClient, of: str) -> None:
        what = f"{of} to give its ranges and pins back"
        wait_until(lambda: held_by(status_of(client)) == (0, 0), what, SOON_S)

    def copies_in_engine(self, rig: TransportRig) -> bool:
        return getattr(registry_for(rig).resolve("transport", rig.transport), "create_server", None) is None

    def provider(self, rig: TransportRig) -> tuple[DeviceTransportProvider[Any], Options]:
        """Return the provider of a device driver, and the server's options; skip the test for any other transport."""
        registry = registry_for(rig)
        provider = registry.resolve("transport", rig.transport)
        if not hasattr(provider, "create_copier"):
            pytest.skip("the transport is none of a device driver")
        return cast("DeviceTransportProvider[Any]", provider), registry.options(
            provider, dict(rig.server_options), where="the kit"
        )

    def driver(self, rig: TransportRig) -> EngineDriver[Any]:
        """Return the half in the engine of a device driver; skip the test for any other transport."""
        provider, _ = self.provider(rig)
        options = registry_for(rig).options(provider, dict(rig.engine_options), where="the kit")
        driver: EngineDriver[Any] = provider.create_engine(options)
        return driver
