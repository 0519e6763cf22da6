"""Owns a copier process as its parent holds it: how it is started, heard and reaped. In the supervisor's thread."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from kvframework.errors import KVFrameworkError

FIRST_S, LONGEST_S = 0.1, 10.0
# A process that lived so long is a new story.
HEALTHY_S = 30.0


class Backoff:
    """Told of every start and end, on one clock."""

    def __init__(self) -> None:
        self._wait_s = 0.0
        self._started = 0.0
        self._ended = 0.0

    def started(self, now: float) -> None:
        self._started = now

    def ended(self, now: float) -> None:
        """The process ended by itself or had to be killed."""
        healthy = now - self._started >= HEALTHY_S
        self._wait_s = FIRST_S if healthy or not self._wait_s else min(self._wait_s * 2, LONGEST_S)
        self._ended = now

    def left(self, now: float) -> float:
        """Seconds until the next start may be, 0 if it may be now."""
        return max(self._ended + self._wait_s - now, 0.0)


STOP_S = 1.0
_RECEIVE = 1 << 18
# The paths of this process and no other: with -m the working directory would come first.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from kvframework.devices.copier_process import main; sys.exit(main(sys.argv[1:3]))"
)


@dataclass(eq=False)
class SpawnedCopier:
    """`heard` is when it said its last word, `oldest_s` how long its oldest launch has taken by that, `lost` what it
    ended with if it said so."""

    popen: subprocess.Popen[bytes]
    sock: socket.socket
    heard: float
    lost: KVFrameworkError | None = None
    oldest_s: float = 0.0

    @classmethod
    def start(cls, arena_fd: int) -> SpawnedCopier:
        """Borrows `arena_fd`. Raises what `subprocess.Popen` raises."""
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
        """What is there; None at the end."""
        try:
            return self.sock.recv(_RECEIVE) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def why_ended(self) -> str:
        """How, as the end of a sentence. Waits for the end, a second at most."""
        try:
            status = self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" by signal {signal.Signals(-status).name}" if status < 0 else f" with status {status}"

    def reap(self) -> None:
        """Returns once the process touches nothing any more: at once, unless a driver holds it in the kernel."""
        self.sock.close()
        if self.lost is None:
            self.popen.kill()
        try:
            self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
