"""A copier process on its parent's side: start, receive and reap. In the supervisor's thread."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from kvframework.errors import KVFrameworkError

STOP_S = 1.0
_RECEIVE = 1 << 18
# The paths of this process and no others: with -m the working directory would be the first.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from kvframework.devices.copier_process import main; sys.exit(main(sys.argv[1:3]))"
)


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
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                popen = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(arena_fd), *sys.path],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), arena_fd),
                )
            except BaseException:
                ours.close()
                raise
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

    def why_ended(self) -> str:
        """Return how the process ended, as the end of a sentence. Waits for the end, a second at most."""
        try:
            status = self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" by signal {signal.Signals(-status).name}" if status < 0 else f" with status {status}"

    def reap(self) -> None:
        """Kill the process and return once it touches no memory any more: at once, unless a driver holds it in the
        kernel."""
        self.sock.close()
        if self.lost is None:
            self.popen.kill()
        try:
            self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
