"""A copier process on its parent's side: start, receive and reap. In the supervisor's thread."""

from __future__ import annotations

import socket
import subprocess
import time
from dataclasses import dataclass

from kvframework.child_process import reap, start_child
from kvframework.errors import KVFrameworkError

_RECEIVE = 1 << 18


@dataclass(eq=False)
class SpawnedCopier:
    """A running copier process. `heard` is the time of its last message, `oldest_s` the age of its oldest launch in
    that message, `lost` the error of its last message, if it sent one."""

    popen: subprocess.Popen[bytes]
    sock: socket.socket
    heard: float
    lost: KVFrameworkError | None = None
    oldest_s: float = 0.0

    @classmethod
    def start(cls, arena_fd: int) -> SpawnedCopier:
        """Start a process; borrows `arena_fd`. Raises the errors of `subprocess.Popen`."""
        popen, ours = start_child("kvframework.devices.copier_process", arena_fd)
        ours.setblocking(False)
        return cls(popen, ours, time.monotonic())

    def receive(self) -> bytes | None:
        """Return the received bytes; None at the end."""
        try:
            return self.sock.recv(_RECEIVE) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def reap(self) -> None:
        """Kill the process and return once it touches no memory any more: at once, unless a driver holds it in the
        kernel."""
        self.sock.close()
        if self.lost is None:
            self.popen.kill()
        reap(self.popen)
