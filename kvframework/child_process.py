"""Child processes: their start with a socket to the parent, their end, and the delay before the next start."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys

STOP_S = 1.0
# The paths of this process and no others: with -m the working directory would be the first.
_PROGRAM = (
    "import sys; at = {count} + 1; sys.path[:] = sys.argv[at:]; "
    "from {module} import main; sys.exit(main(sys.argv[1:at]))"
)


def start_child(module: str, *fds: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that runs `main` of `module`, and return it with this end of its socket. The arguments of `main`
    are the number of the other end, then those of `fds`, which are borrowed. The thread that calls has
    to live as long as the child. Raises the errors of `subprocess.Popen`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        numbers = (theirs.fileno(), *fds)
        program = _PROGRAM.format(module=module, count=len(numbers))
        try:
            popen = subprocess.Popen(
                [sys.executable, "-c", program, *map(str, numbers), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=numbers,
            )
        except BaseException:
            ours.close()
            raise
    return popen, ours


def reap(popen: subprocess.Popen[bytes]) -> None:
    """Return once the process has ended; kill it if it does not within `STOP_S` seconds."""
    try:
        popen.wait(STOP_S)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()


def why_ended(popen: subprocess.Popen[bytes]) -> str:
    """Return how the process ended, as the end of a sentence; "" for one that has not `STOP_S` seconds later."""
    try:
        status = popen.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return ""
    return f" {how_ended(status)}"


def how_ended(status: int) -> str:
    """Return a process's return code in words: "by signal SIGKILL", "with status 1". A real-time signal has only its
    number."""
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by signal {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process as soon as the thread that started it has ended for any reason. `parent` is the
    id of its process, which may have ended before this call; None: the child notices that by other means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


FIRST_S, LONGEST_S = 0.1, 10.0
# After a life of this length, a process's end starts a new backoff.
HEALTHY_S = 30.0


class Backoff:
    """The delay before the next start, from every start and end on one clock."""

    def __init__(self, *, at_once: bool = False) -> None:
        """`at_once`: the first start after a healthy life waits for nothing."""
        self._least_s = 0.0 if at_once else FIRST_S
        self._wait_s = 0.0
        self._started = 0.0
        self._ended = 0.0

    def started(self, now: float) -> None:
        self._started = now

    def ended(self, now: float, *, served: bool = False) -> None:
        """Note that the process ended by itself or had to be killed. A life in which it `served` is a healthy one."""
        healthy = served or now - self._started >= HEALTHY_S
        self._wait_s = self._least_s if healthy else min(max(self._wait_s * 2, FIRST_S), LONGEST_S)
        self._ended = now

    def left(self, now: float) -> float:
        """Return the seconds until the next start may be, 0 if it may be now."""
        return max(self._ended + self._wait_s - now, 0.0)
