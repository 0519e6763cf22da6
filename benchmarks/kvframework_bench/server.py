"""The server under measurement: a `kvframework serve` process with defaults otherwise, its memory and processor
time.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvf_demo.processes import uninterrupted
from kvframework.client import KVClient
from kvframework.wire import messages as m
from kvframework.wire.frames import join
from kvframework.wire.protocol import offer
from kvframework_bench.process import BenchChild, running

_START_S = 30.0
_READY_S = 120.0
_POLL_S = 0.005
_FREED_S = 5.0
# A bench waits where an engine would compute: a late answer shows in the figures and is no miss. This is the scale of
# clients' deadlines.
PATIENT = 20.0


@dataclass(frozen=True)
class RunningServer:
    """A server under measurement. `start_s` is the time from the start of the process to its first answer."""

    child: BenchChild
    endpoint: str
    start_s: float

    @contextmanager
    def client(self) -> Iterator[KVClient]:
        """Yield a connected client. Waits until all of the arena is usable. Raises `BenchFailed`."""
        with KVClient(self.endpoint, name="bench", deadline_scale=PATIENT) as client:
            deadline = time.monotonic() + _READY_S
            while not _arena_ready(client):
                self.child.check_alive()
                if time.monotonic() > deadline:
                    raise self.child.failure(f"has not touched its arena within {_READY_S:.0f} s")
                time.sleep(_POLL_S)
            yield client


@contextmanager
def running_server(directory: Path, capacity: int, settings: Sequence[str] = ()) -> Iterator[RunningServer]:
    """Yield a new server with `capacity` bytes of L1, and `settings` in the words of `serve --set`. Waits for its first
    answer; the server ends with the context.

    Raises `BenchFailed` with the end of its log.
    """
    endpoint = f"ipc://{directory}/server.sock"
    command = [sys.executable, "-m", "kvframework.cli.main", "serve"]
    for setting in (f"server.endpoint={endpoint}", f"l1.capacity={capacity}", *settings):
        command += ["--set", setting]
    started = time.perf_counter()
    with running("server", command, directory) as child:
        _await_answer(child, endpoint)
        yield RunningServer(child, endpoint, time.perf_counter() - started)


def _await_answer(child: BenchChild, endpoint: str) -> None:
    """Return with the first answer. A bare socket: a client's pauses between its tries would be measured too."""
    context = zmq.Context()
    try:
        # A socket that the context does not know yet would keep it from ending.
        with uninterrupted():
            dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, 2)
        dealer.connect(endpoint)
        dealer.send_multipart(join(1, "HELLO", offer("bench", os.getpid())))
        deadline = time.monotonic() + _START_S
        while not dealer.poll(100):
            child.check_alive()
            if time.monotonic() > deadline:
                raise child.failure(f"did not answer within {_START_S:.0f} s")
    finally:
        context.destroy(0)


def status(client: KVClient) -> dict[str, Any]:
    """Return the document of REPORT_STATUS."""
    document: dict[str, Any] = msgspec.json.decode(client.request("REPORT_STATUS", m.Empty(), m.StatusReply).document)
    return document


def emptied(client: KVClient) -> m.Cleared:
    """Clear L1 and return what left it. Waits for the pins of tickets that are free, of which the server hears with the
    client's next PING; those in use after 5 seconds stay."""
    deadline = time.monotonic() + _FREED_S
    objects = 0
    while True:
        cleared = client.request("CLEAR", m.Clear(), m.Cleared)
        objects += cleared.objects
        if not cleared.in_use or time.monotonic() > deadline:
            return msgspec.structs.replace(cleared, objects=objects)
        time.sleep(_POLL_S)


def _arena_ready(client: KVClient) -> bool:
    _ = client.hello
    l1 = status(client)["l1"]
    return bool(l1["ready_bytes"] == l1["capacity_bytes"])


class Resident(msgspec.Struct, frozen=True):
    """Resident memory in bytes. The arena is shared memory, so `shmem` is left out of a server's cost."""

    anon: int
    file: int
    shmem: int

    @property
    def excluding_shared(self) -> int:
        return self.anon + self.file


def resident(pid: int) -> Resident:
    return parse_status(Path(f"/proc/{pid}/status").read_text())


def parse_status(text: str) -> Resident:
    """Parse the text of /proc/PID/status. Raises `ValueError` if the sizes are missing."""
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"^(Rss\w+):\s*(\d+) kB$", text, re.MULTILINE)}
    try:
        return Resident(sizes["RssAnon"], sizes["RssFile"], sizes["RssShmem"])
    except KeyError as error:
        raise ValueError(f"no {error.args[0]} in the status of a process") from None


def has_mapped(pid: int, library: str) -> bool:
    """Return whether a file whose name contains `library` is mapped by the process."""
    return library in Path(f"/proc/{pid}/maps").read_text()


def idle_cores(pid: int, seconds: float) -> float:
    """Return the share of a core that the process uses during the next `seconds`. Blocks so long."""
    before, started = run_ns(pid), time.perf_counter_ns()
    time.sleep(seconds)
    return (run_ns(pid) - before) / (time.perf_counter_ns() - started)


def run_ns(pid: int) -> int:
    """Return the nanoseconds that the process's threads have run; ticks of 10 ms are too coarse for an idle process."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))


class PeakMeter:
    """The peak of a process's memory since the constructor. Where the kernel cannot reset the peak, an earlier one
    counts as well."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = resident(pid)

    def growth(self) -> int:
        """Return the bytes above those at the start, at the highest. Shared memory that was mapped since then counts,
        too."""
        before = self._before.excluding_shared + self._before.shmem
        return max(parse_peak(Path(f"/proc/{self._pid}/status").read_text()) - before, 0)


def parse_peak(text: str) -> int:
    """Return the highest resident memory in bytes, from the text of /proc/PID/status. Raises `ValueError` without
    it."""
    found = re.search(r"^VmHWM:\s*(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise ValueError("no VmHWM in the status of a process")
    return int(found[1]) * 1024
