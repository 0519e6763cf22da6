"""The server of the transport kit in a thread of the test's process, and its clients."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvf_dev.testing.transport.cases import CHUNK
from kvf_dev.testing.transport.engine import PATIENCE_S, registry_for
from kvf_dev.testing.transport.rig import TransportRig
from kvframework.client import KVClient
from kvframework.config import load_config
from kvframework.devices import messages
from kvframework.server import Server


def settings_for(rig: TransportRig, endpoint: str) -> list[str]:
    """The server's configuration as `--set` overrides."""
    return [
        f"server.endpoint={endpoint}",
        f"server.chunk_size={CHUNK}",
        "l1.capacity=8MiB",
        f"transport.0.use={rig.transport}",
        *(f"transport.0.{name}={value}" for name, value in rig.server_options.items()),
    ]


@contextmanager
def small_slices() -> Iterator[None]:
    """Have copiers that start meanwhile pin the arena in several slices, as those of real arenas do."""
    before, messages.SLICE_BYTES = messages.SLICE_BYTES, 1 << 20
    try:
        yield
    finally:
        messages.SLICE_BYTES = before


@contextmanager
def serving(rig: TransportRig) -> Iterator[Server]:
    """A real server on real sockets, in a thread."""
    with small_slices(), tempfile.TemporaryDirectory(prefix="kvf-") as directory:
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
            assert not thread.is_alive(), "the server did not stop"


def client_of(rig: TransportRig, endpoint: str) -> KVClient:
    """A connected client; the caller closes it."""
    client = KVClient(endpoint, plugins=registry_for(rig), deadline_scale=20.0)
    assert client.wait_up(PATIENCE_S), "no connection to the server"
    return client


def held_by(status: dict[str, object]) -> tuple[int, int]:
    """Return (pins, write leases) of a server's status document."""
    l1 = status["l1"]
    assert isinstance(l1, dict)
    return l1["pins"], l1["write_leases"]


def status_of(client: KVClient) -> dict[str, object]:
    """Return the server's status document."""
    from kvframework.wire import messages as m

    reply = client.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=5.0)
    document: dict[str, object] = msgspec.json.decode(reply.document)
    return document
