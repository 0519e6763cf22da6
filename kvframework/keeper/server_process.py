"""A server as the child of `kvframework hold`: its start with the kept descriptors, and how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
from collections.abc import Mapping, Sequence
from typing import NoReturn

from kvframework.keeper.sd_notify import FIRST_FD, LISTEN_VARIABLES, NOTIFY_VARIABLE, listen_variables
from kvframework.supervise.state import Life

EXIT_NOT_STARTED = 127
# A new server beside a running one has this long to take over.
TAKEOVER_S = 60.0


class Server(Life):
    """A child. `takeover`: it has yet to get ready beside, or after, another."""

    def __init__(self, pid: int, now: float, *, takeover: bool) -> None:
        super().__init__(now, TAKEOVER_S if takeover else math.inf)
        self.pid = pid
        self.takeover = takeover

    def send(self, number: int) -> None:
        """Send a signal; as long as the end is not seen, no other process can have the number."""
        os.kill(self.pid, number)


def start_server(
    command: Sequence[str], environ: Mapping[str, str], kept: Sequence[tuple[str, int]], notify_path: str
) -> int:
    """Start `command` with duplicates of the kept descriptors, and return its process id. It has a session of its own,
    so that a terminal's Ctrl-C reaches it through its keeper alone. Only for a process with one thread. Raises
    `OSError`."""
    # A signal for the new process waits until it has its default effect there.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(command, environ, kept, notify_path)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _become(
    command: Sequence[str], environ: Mapping[str, str], kept: Sequence[tuple[str, int]], notify_path: str
) -> NoReturn:
    """In the child: run the command. Nothing that it raises may reach the code of the parent."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        names = [name for name, _ in kept]
        # First beyond the numbers that they get, so that none replaces another.
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD + len(kept)) for _, fd in kept]
        for place, fd in enumerate(moved, FIRST_FD):
            os.dup2(fd, place, inheritable=True)
        inherited = {name: value for name, value in environ.items() if name not in LISTEN_VARIABLES}
        own = {NOTIFY_VARIABLE: notify_path, **listen_variables(names, os.getpid())}
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execve(command[0], [*command], inherited | own)  # noqa: S606
    except BaseException as error:  # noqa: BLE001
        with contextlib.suppress(OSError):
            os.write(2, f"{command[0]}: {error}\n".encode(errors="replace"))
    os._exit(EXIT_NOT_STARTED)


def exit_status(status: int) -> int:
    """The exit status that passes this wait status on, as a shell does."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def memory_kills(membership: str = "/proc/self/cgroup", groups: str = "/sys/fs/cgroup") -> int | None:
    """How many processes of this one's control group the kernel has killed for lack of memory, None where it does not
    say so."""
    with contextlib.suppress(OSError):
        with open(membership, encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
        for _, controllers, group in lines:
            if "memory" in controllers.split(","):
                names = (f"{groups}/memory{group}/memory.oom_control", f"{groups}/memory/memory.oom_control")
            elif not controllers:
                names = (f"{groups}{group}/memory.events", f"{groups}/memory.events")
            else:
                continue
            # The second: a container sees its own group as the root.
            for name in names:
                counts = _counts(name)
                if "oom_kill" in counts:
                    return counts["oom_kill"]
    return None


def _counts(path: str) -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return {name: int(count) for name, count in (line.split() for line in file)}
    return {}
