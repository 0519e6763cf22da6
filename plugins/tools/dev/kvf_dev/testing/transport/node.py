"""The server of the transport kit in a thread of the test's process, its clients, and the processes that a test drives:
servers and engines, each with a rig of its own.

As a program: `server RIG ENDPOINT` serves until its input ends; `engine RIG ENDPOINT INSTANCE CASE` takes one JSON list
a line and answers with one. `["store", seed]` and `["load", seed]` wait for the result, `["begin", "store" or "load",
seed]` does not. `["check", instance]` returns the differences after a load of objects that another instance of the same
case has stored.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import msgspec
import pytest

from kvf_dev.testing.kit import Kit, wait_until
from kvf_dev.testing.transport.engine import (
    CASES,
    CHUNK,
    NHD,
    PATIENCE_S,
    GroupCase,
    KitEngine,
    MemoryModel,
    registry_for,
)
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.api.futures import Future
from kvframework.api.plugin import Options
from kvframework.client import KVClient
from kvframework.config.load import load_config
from kvframework.server import Server
from kvframework.wire.messages import Empty, StatusReply

_READY = "ready"


def settings_for(rig: TransportRig, endpoint: str) -> list[str]:
    return [
        f"server.endpoint={endpoint}",
        f"server.chunk_size={CHUNK}",
        "l1.capacity=8MiB",
        f"transport.0.use={rig.transport}",
        *(f"transport.0.{name}={value}" for name, value in rig.server_options.items()),
    ]


@contextmanager
def serving(rig: TransportRig) -> Iterator[Server]:
    """A real server on real sockets, in a thread. Its copiers pin the arena in several slices, as those of real arenas
    do."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="kvf-") as directory:
        if importlib.util.find_spec("kvf_devices"):
            patch.setattr("kvf_devices.messages.SLICE_BYTES", 1 << 20)
        config = load_config(None, tuple(settings_for(rig, f"ipc://{directory}/s.sock")))
        server = Server(config, registry_for(rig))
        server.bind()
        thread = threading.Thread(target=server.serve_forever, name="kit-server")
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "The server did not stop"


def client_of(rig: TransportRig, endpoint: str) -> KVClient:
    client = KVClient(endpoint, plugins=registry_for(rig), deadline_scale=20.0)
    assert client.wait_up(PATIENCE_S), "No connection to the server"
    return client


def held_by(status: dict[str, object]) -> tuple[int, int]:
    l1 = status["l1"]
    assert isinstance(l1, dict)
    return l1["pins"], l1["write_leases"]


def status_of(client: KVClient) -> dict[str, object]:
    reply = client.request("REPORT_STATUS", Empty(), StatusReply, timeout=5.0)
    return msgspec.json.decode(reply.document, type=dict[str, object])


class Program:
    """A process of this module, or of one like it, that is `what` at the server's `endpoint`."""

    module: ClassVar[str] = "kvf_dev.testing.transport.node"

    def __init__(self, what: str, spec: RigSpec, endpoint: str, *arguments: str) -> None:
        self.endpoint = endpoint
        rig = json.dumps([spec.factory, dict(spec.arguments)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, what, rig, endpoint, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": ""},
        )
        assert (line := self.next_line()) == _READY, f"A process of the kit did not start: it printed {line!r}"

    def kill(self) -> None:
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [int(child) for each in lists for child in each.read_text().split()]
        self.process.kill()
        self.close()
        wait_until(lambda: not any(map(_is_running, children)), "the children of a killed process to end")

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def next_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"A process of the kit exited with status {self.process.wait()}"
        return line.strip()

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: object) -> object:
        self.send(*words)
        return json.loads(self.next_line())


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _serve(rig: TransportRig, endpoint: str) -> None:
    server = Server(load_config(None, tuple(settings_for(rig, endpoint))), registry_for(rig))
    server.bind()

    def stop_with_input() -> None:
        sys.stdin.read()
        server.stop()

    threading.Thread(target=stop_with_input, daemon=True).start()
    os.write(1, f"{_READY}\n".encode())
    server.serve_forever()


def _compute(rig: TransportRig, endpoint: str, instance: str, case: str) -> None:
    with client_of(rig, endpoint) as client:
        engine = KitEngine(rig, client, int(instance), CASES[case], seed=int(instance))
        os.write(1, f"{_READY}\n".encode())
        for line in sys.stdin:
            os.write(1, f"{json.dumps(_done(engine, *json.loads(line)))}\n".encode())
        engine.close()


def _done(engine: KitEngine, what: str, *words: object) -> object:
    number = int(str(words[-1]))
    if what == "check":
        other = MemoryModel(engine.groups, engine.model.blocks, number)
        engine.expect_loaded(other, engine.source(seed=number), engine.target())
        return engine.differences()
    future = engine.submit(str(words[0]) if what == "begin" else what, engine.request(number))
    return what == "begin" or future.result(PATIENCE_S).ok


def rig_told(argument: str) -> TransportRig:
    factory, options = json.loads(argument)
    return RigSpec(factory, options).make()


def endpoint_in(directory: Path) -> str:
    return f"ipc://{directory}/s.sock"


def main() -> None:
    what, told, *arguments = sys.argv[1:]
    rig = rig_told(told)
    if what == "server":
        _serve(rig, *arguments)
    else:
        _compute(rig, *arguments)
    rig.close()


if TYPE_CHECKING:
    from kvf_devices import DeviceTransportProvider, EngineDriver

T = TypeVar("T")
Reads = Sequence[Callable[[], bytes | None]]
SOON_S = 5.0
_NUMBERS = itertools.count(1)


class TransportKit(Kit):
    """Give `use`, and `make_rig` for memory of a device. One server and one client serve all tests of a class."""

    use: ClassVar[str] = ""
    """Name of the transport; its entry point is `transport.<use>`."""

    make_rig: ClassVar[str] = ""
    """Maker of the rig, "module:function" of an importable module, which is called with `directory`, a new folder. It
    runs in each process that is the engine. Without it the kit's memory is host memory (`HostRig`)."""

    # Seconds for which a submit may keep the engine's thread while its copy is held, and for events that need no call.
    submit_budget_s = 0.05
    usual_s = 140.0
    patience_s: ClassVar[float] = 20.0

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, tmp_path_factory: pytest.TempPathFactory) -> RigSpec:
        """The recipe for the rig. A fixture that replaces this one, of class scope, may give the maker other arguments,
        and start and end what the device needs."""
        assert cls.use or cls.make_rig, "Set `use`, the transport's name, or `make_rig`, or define a fixture `spec`"
        arguments = {"directory": str(tmp_path_factory.mktemp("rig"))}
        arguments |= {} if cls.make_rig else {"transport": cls.use}
        return RigSpec(cls.make_rig or "kvf_dev.testing.transport:HostRig", arguments)

    @pytest.fixture(scope="class", name="rig")
    @classmethod
    def _make_rig(cls, spec: RigSpec) -> Iterator[TransportRig]:
        made = spec.make()
        yield made
        made.close()

    @pytest.fixture(scope="class", name="server")
    @classmethod
    def _serve(cls, rig: TransportRig) -> Iterator[Server]:
        with serving(rig) as running:
            yield running

    @pytest.fixture(scope="class", name="client")
    @classmethod
    def _connect(cls, rig: TransportRig, server: Server) -> Iterator[KVClient]:
        with client_of(rig, server.endpoint) as connected:
            yield connected

    @pytest.fixture
    def engine(self) -> KitEngine:
        return self.make_engine(NHD)

    def make_engine(self, groups: Sequence[GroupCase], **options: Any) -> KitEngine:
        number = next(_NUMBERS)
        engine = KitEngine(options.pop("rig", self.rig), self.client, number, groups, seed=number, **options)
        self._engines.callback(engine.close)
        return engine

    @pytest.fixture(autouse=True)
    def _run(
        self, spec: RigSpec, rig: TransportRig, server: Server, client: KVClient, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        """After every test: no pin and no reservation is left, and the device noted no mistake."""
        self.recipe, self.rig, self.server, self.client, self.patch = spec, rig, server, client, monkeypatch
        before = len(rig.problems())
        with ExitStack() as self._engines:
            yield
        self.must_be_given_back("a test")
        if found := rig.problems()[before:]:
            pytest.fail(f"The device recorded a misuse: {found[0]}", pytrace=False)

    @contextmanager
    def doomed(self) -> Iterator[tuple[Program, KVClient, KitEngine]]:
        with tempfile.TemporaryDirectory(prefix="kvf-") as directory, ExitStack() as stack:
            server = Program("server", self.recipe, endpoint_in(Path(directory)))
            stack.callback(server.close)
            client = stack.enter_context(client_of(self.rig, server.endpoint))
            engine = KitEngine(self.rig, client, 1, NHD, seed=1)
            stack.callback(engine.close)
            yield server, client, engine

    @contextmanager
    def in_mid_copy(self, submit: Callable[[], Future[T]]) -> Iterator[tuple[Future[T], Callable[[], None]]]:
        """A transfer whose copy stands still in its middle until the second value is called, or the block ends. Skips
        the test for a transport that copies in the engine's thread."""
        if self.rig.synchronous:
            pytest.skip("The transport copies in the engine's thread: nothing is under way after a submit")
        with ExitStack() as held:
            held.enter_context(self.rig.holding_copies())
            future = submit()
            wait_until(self.rig.held, "a copy that the rig holds")
            yield future, held.close

    def must_go_on(self, reads: Reads) -> None:
        what = "a stream to go on after a transfer that has ended"
        wait_until(lambda: all(read() is not None for read in reads), what, self.patience_s)

    def must_be_given_back(self, of: str) -> None:
        wait_until(lambda: held_by(status_of(self.client)) == (0, 0), f"{of} to release its ranges and pins")

    def copiers(self) -> dict[str, int | None]:
        transports = status_of(self.client)["transports"]
        assert isinstance(transports, dict)
        return {each["device"]: each["pid"] for each in transports.get(self.rig.transport, {}).get("devices", ())}

    def provider(self) -> tuple[DeviceTransportProvider[Any], Options]:
        registry = registry_for(self.rig)
        provider = registry.resolve("transport", self.rig.transport)
        if not hasattr(provider, "create_copier"):
            pytest.skip("The transport has no device driver")
        return cast("DeviceTransportProvider[Any]", provider), registry.options(
            provider, dict(self.rig.server_options), where="the kit"
        )

    def driver(self) -> EngineDriver[Any]:
        provider, _ = self.provider()
        options = registry_for(self.rig).options(provider, dict(self.rig.engine_options), where="the kit")
        return provider.create_engine(options)


if __name__ == "__main__":
    main()
