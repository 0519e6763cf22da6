"""Closing waits for nobody for ever: not for a process that the kernel holds, not for a resolver that hangs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvf_devices.endpoints import CLOSE_S, DeviceServerTransport
from kvf_devices.messages import Start
from kvf_devices.supervisor import CopierSupervisor
from kvframework.api.layout import KVLayout, LayerGroup, canonical_desc
from kvframework.client import KVClient
from kvframework.errors import DeviceLost
from kvframework.supervise.child import NamedCall
from tests.support.waiting import wait_until

LONG_S = 100.0
LAYOUT = KVLayout("paged", (LayerGroup(1, 16, 1, 8, "float32"),), num_blocks=1)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Set to let go of whatever hangs."""
    event = threading.Event()
    yield event
    event.set()


def test_a_copier_that_the_kernel_holds_keeps_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    class Held(subprocess.Popen[bytes]):
        """Killed, and not gone."""

        def kill(self) -> None:
            return

    def spawn(supervisor: CopierSupervisor) -> subprocess.Popen[bytes]:
        supervisor._socket, theirs = socket.socketpair()
        supervisor._socket.setblocking(False)
        with theirs:
            processes.append(Held([sys.executable, "-c", "import time; time.sleep(600)"], stdin=theirs))
        return processes[-1]

    monkeypatch.setattr(CopierSupervisor, "spawn", spawn)
    transport = object.__new__(DeviceServerTransport)
    transport._copiers = {
        f"gpu-{number}": CopierSupervisor(
            Start(NamedCall("m:create", "m:Options", b""), f"gpu-{number}"), 0, stall_s=60.0
        )
        for number in range(3)
    }
    copiers = list(transport._copiers.values())
    instances = [each.open(LAYOUT, canonical_desc(LAYOUT, 16), (), None) for each in copiers]
    wait_until(lambda: all(each.pid for each in copiers))
    began = time.monotonic()
    transport.close()
    assert time.monotonic() - began < LONG_S / 2
    assert CLOSE_S < 4.7 - 3.5, "within the time that a server has to end"
    assert caplog.text.count(", does not end, because the process is blocked in the kernel") == 3
    assert not any(each.closed.query() for each in instances), "nobody says that it touches the memory no more"
    for process in processes:
        process.send_signal(signal.SIGKILL)
    assert all(each.join(20) for each in copiers)
    assert all(each.closed.query() and isinstance(each.failure(), DeviceLost) for each in instances)


def test_closing_a_client_does_not_wait_for_a_resolver(monkeypatch: pytest.MonkeyPatch, held: threading.Event) -> None:
    asked = threading.Event()

    def resolve(*_: object, **__: object) -> list[object]:
        asked.set()
        held.wait(LONG_S)
        raise socket.gaierror(-3, "temporary failure")

    monkeypatch.setattr("kvframework.messaging.client.connection._CLOSE_S", 0.1)
    monkeypatch.setattr("kvframework.messaging.client.connection.socket.getaddrinfo", resolve)
    client = KVClient("tcp://cache.example:5555")
    assert asked.wait(60)
    thread = client._connection._thread
    closing = threading.Thread(target=client.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert thread.is_alive(), "it still hangs there, and ends by itself"
    held.set()
    wait_until(lambda: not thread.is_alive(), 30)
