"""A child process with a socket to its parent: its start, and its end. In the thread that starts it, which has to live
as long as the child."""

from __future__ import annotations

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
    are the number of the other end, then those of `fds`, which are borrowed. Raises the errors of `subprocess.Popen`.
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
