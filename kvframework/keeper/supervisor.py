"""The process of `kvframework hold`: a server as its child, and an fd store for it. No plugin, no thread."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any, NoReturn

from kvframework.keeper import sd_notify, sockets
from kvframework.keeper.sockets import CONTROL_SUFFIX
from kvframework.supervise.state import HEALTHY_S, Backoff, Life, how_ended

TAKEOVER = "--takeover"
# A new server beside a running one has this long to take over.
TAKEOVER_S = 60.0
# A server ends within 5 s of a signal.
STOP_S = 8.0
EXIT_REFUSED, EXIT_NOT_STARTED = 2, 127
MAX_KEPT = 16
_STDERR = 2
_LOGGER = "kvframework.hold"
_MAX_TEXT = 2000  # a pipe takes a line of less than PIPE_BUF bytes as a whole
_MESSAGES_AT_ONCE = 64
_PASSED_ON = (signal.SIGHUP, signal.SIGUSR1)
_ENDING = (signal.SIGINT, signal.SIGTERM)


class Lines:
    """Writes lines to standard error in the form of the server's log. A reader that does not read loses them."""

    def __init__(self, form: str) -> None:
        self._json, self._fd = form == "json", _STDERR
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(_STDERR).st_mode):
                # A separate open file: not blocking here leaves it as it is for all others.
                self._fd = os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)

    def write(self, text: str, level: str = "info") -> None:
        now, text = datetime.now(timezone.utc), text[:_MAX_TEXT]
        if self._json:
            entry = {"time": now.isoformat(timespec="milliseconds"), "level": level, "logger": _LOGGER, "message": text}
            line = json.dumps(entry)
        else:
            local = now.astimezone()
            line = f"{local:%Y-%m-%d %H:%M:%S},{local.microsecond // 1000:03d} {level.upper()} {_LOGGER}: {text}"
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        with contextlib.suppress(OSError):
            if any(event & select.POLLOUT for _, event in poll.poll(0)):
                os.write(self._fd, f"{line}\n".encode("utf-8", "backslashreplace"))


class Server(Life):
    """A child. `takeover`: it has yet to get ready beside, or after, another."""

    def __init__(self, pid: int, now: float, *, takeover: bool) -> None:
        super().__init__(now, TAKEOVER_S if takeover else math.inf)
        self.pid = pid
        self.takeover = takeover

    def send(self, number: int) -> None:
        """Send a signal; as long as the end is not seen, no other process can have the number."""
        os.kill(self.pid, number)


def start_server(command: Sequence[str], environ: Mapping[str, str], kept: Mapping[str, int], notify_path: str) -> int:
    """Start `command` with duplicates of the kept descriptors, and return its process id. It has a separate session,
    so that a terminal's Ctrl-C reaches it by its keeper alone. For a process with one thread. Raises `OSError`."""
    # A signal for the new process waits until it has its default effect there.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(command, environ, kept, notify_path)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _become(command: Sequence[str], environ: Mapping[str, str], kept: Mapping[str, int], notify_path: str) -> NoReturn:
    """In the child: run the command. Nothing that it raises may reach the code of the parent."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        # First beyond the numbers that they get, so that none replaces another.
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, sd_notify.FIRST_FD + len(kept)) for fd in kept.values()]
        for place, fd in enumerate(moved, sd_notify.FIRST_FD):
            os.dup2(fd, place, inheritable=True)
        inherited = {name: value for name, value in environ.items() if name not in sd_notify.LISTEN_VARIABLES}
        own = {sd_notify.NOTIFY_VARIABLE: notify_path, **sd_notify.listen_variables([*kept], os.getpid())}
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execve(command[0], [*command], inherited | own)  # noqa: S606
    except BaseException as error:  # noqa: BLE001
        with contextlib.suppress(OSError):
            os.write(2, f"{command[0]}: {error}\n".encode(errors="replace"))
    os._exit(EXIT_NOT_STARTED)


class FdStoreSupervisor:
    """Keeps one server running until SIGINT or SIGTERM, and what it stores until then. `command` starts a server; with
    `TAKEOVER` as a further argument, one that takes over from another. `base` is the path that the sockets' names begin
    with, in an existing directory where no other user may write."""

    def __init__(self, command: Sequence[str], base: str, lines: Lines) -> None:
        self._command, self._base, self._log = command, base, lines
        self._environ = os.environ | {sd_notify.SINCE_VARIABLE: str(time.monotonic())}
        # The held descriptors, the oldest name first.
        self._kept: dict[str, int] = {}
        self._servers: dict[int, Server] = {}
        self._main: Server | None = None
        self._backoff = Backoff()
        self._start_at = -math.inf
        self._starts = self._strangers = 0
        self._last_end = ""
        self._stopping = False
        self._has_terminal = os.isatty(_STDERR)
        self._status: int | None = None
        # The --drop or --reload that is under way, and the descriptor of its caller.
        self._pending: tuple[str, int] | None = None

    def run(self) -> int:
        """Run until a signal has ended the server, and return the exit status for this process. In the main thread.
        Raises `AlreadyHeldError`, and `OSError` for sockets that cannot be made."""
        with ExitStack() as stack:
            stack.callback(self._forget_all)
            since = stack.enter_context(sockets.locked(self._base))
            if sd_notify.KEEPER_VARIABLE in self._environ:  # of a pod, which may outlive its container
                self._environ[sd_notify.SINCE_VARIABLE] = str(since)
            self._socket = sockets.KeeperSocket(self._base + CONTROL_SUFFIX)
            stack.callback(self._socket.close)
            self._signals = sockets.heard_signals((*_ENDING, *_PASSED_ON, signal.SIGCHLD))
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            poll.register(self._signals, select.POLLIN)
            while self._status is None:
                due = self._time(time.monotonic())
                poll.poll(None if due == math.inf else max(due - time.monotonic(), 0) * 1000 + 1)
                self._hear(_MESSAGES_AT_ONCE)
                self._hear_signals()
                self._reap()
            return self._status

    def _time(self, now: float) -> float:
        """Start and kill what is due; return when something will be."""
        if now >= self._start_at:
            self._start_at = math.inf
            self._main = self._start(now)
        for server in self._servers.values():
            if server.must_be_killed(now):
                self._log.write(f"the server, process {server.pid}, did not end in time and is killed", "error")
                server.send(signal.SIGKILL)
        return min([self._start_at, *(server.kill_at for server in self._servers.values())])

    def _start(self, now: float, *further: str) -> Server | None:
        try:
            pid = start_server([*self._command, *further], self._environ, self._kept, self._base + CONTROL_SUFFIX)
        except OSError as error:
            self._log.write(f"the server cannot be started: {error.strerror}", "error")
            if not further:
                self._start_at = now + self._backoff.delay(now)
            return None
        self._starts += 1
        self._log.write(
            f"the server is process {pid}, start {self._starts}; kept: {', '.join(self._kept) or 'nothing'}"
        )
        server = self._servers[pid] = Server(pid, now, takeover=bool(further))
        return server

    def _hear(self, most: int) -> None:
        for _ in range(most):
            received = self._socket.receive()
            if received is None:
                return
            request = received.request()
            if request is None or received.fd is None:
                self._obey(received)
            elif (refused := self._refused(received.fd, request)) is not None:
                sockets.reply(received.fd, {"done": False, "text": refused})

    def _obey(self, received: sockets.Received) -> None:
        pid, note, fd = received.pid, sd_notify.parse_note(received.payload), received.fd
        server = self._servers.get(pid)
        if server is not None and note.store and note.name and fd is not None:
            if note.name in self._kept or len(self._kept) < MAX_KEPT:
                self._forget(note.name)
                self._kept[note.name] = fd
                self._log.write(f"the keeper holds the memory {note.name!r} of process {pid}")
                return
            self._log.write(f"cannot hold the memory {note.name!r} of process {pid}: at most {MAX_KEPT} fit", "error")
        if fd is not None:
            os.close(fd)
        if server is None:
            self._strangers += 1
            if self._strangers & (self._strangers - 1) == 0:  # the 1st, 2nd, 4th, ...
                text = f"ignored a message of process {pid}, uid {received.uid}: {self._strangers} such messages in all"
                self._log.write(text, "warning")
            return
        if note.remove and self._forget(note.name):
            self._log.write(f"the keeper released the memory {note.name!r}")
        if note.ready and server.ready_at is None:
            self._is_ready(server)
        if note.extend_s and server.stopping:
            server.kill_at = time.monotonic() + note.extend_s
        if note.stopping and server is self._main and not self._stopping:
            self._log.write("the server stops by itself, so the keeper frees its memory and ends")
            self._stopping = True
            server.stop(time.monotonic(), STOP_S)

    def _forget(self, name: str) -> bool:
        """Close what is kept under a name, which blocks until its memory is free; False if nothing is."""
        fd = self._kept.pop(name, None)
        if fd is not None:
            os.close(fd)
        return fd is not None

    def _forget_all(self) -> None:
        for name in list(self._kept):
            self._forget(name)

    def _is_ready(self, server: Server) -> None:
        now = time.monotonic()
        server.ready(now)
        took_over, server.takeover = server.takeover, False
        self._log.write(f"the server, process {server.pid}, is ready after {now - server.started:.2f} s")
        if took_over:
            if self._main is not None and self._main is not server:
                self._end(self._main)
            self._main = server
            self._finish("reload", True, f"process {server.pid} has taken over")

    def _hear_signals(self) -> None:
        try:
            numbers = self._signals.recv(64)
        except BlockingIOError:
            return
        for number in numbers:
            if number in _ENDING:
                self._stop(signal.Signals(number))
            elif number == signal.SIGHUP and self._has_terminal and not os.isatty(_STDERR):
                self._stop(signal.SIGTERM)  # the terminal has closed
            elif number in _PASSED_ON and self._main is not None:
                self._main.send(number)

    def _stop(self, number: signal.Signals) -> None:
        self._log.write(f"{number.name}: the keeper ends the server and frees its memory")
        self._stopping, self._start_at = True, math.inf
        if self._pending is not None:
            self._finish(self._pending[0], False, "the keeper is ending")
        for server in self._servers.values():
            self._end(server, number)
        if not self._servers:
            self._status = 0

    def _end(self, server: Server, number: int = signal.SIGTERM) -> None:
        server.stop(time.monotonic(), STOP_S)
        server.send(number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                # It says nothing more, and what it said before its end counts. What others said may have this one sent
                # a signal: it has its number until it is reaped.
                self._hear(1 << 16)
                pid, status = os.waitpid(ended.si_pid, 0)
                if pid in self._servers:
                    self._ended(self._servers.pop(pid), os.waitstatus_to_exitcode(status))

    def _ended(self, server: Server, code: int) -> None:
        how = f"the server, process {server.pid}, ended {how_ended(code)}"
        status = code if code >= 0 else 128 - code
        if server is self._main:
            self._last_end = how
            successor = next((each for each in self._servers.values() if each.takeover), None)
            self._main = successor
            if successor is not None:
                if not self._stopping:
                    successor.kill_at = math.inf
                self._log.write(f"{how}; process {successor.pid} takes over")
                return
            self._after_end(server, status, how)
        else:
            beside = server.takeover and self._main is not None
            self._log.write(f"{how}{' before it was ready: the old server keeps running' if beside else ''}")
            if beside:
                text = f"{how} before it was ready: the old server keeps running; see the keeper's log"
                self._finish("reload", False, text)
        if self._stopping and not self._servers:
            self._status = status

    def _after_end(self, server: Server, status: int, how: str) -> None:
        now = time.monotonic()
        if server.takeover:
            self._finish("reload", False, f"{how} before it was ready; the old server ended too: a new one starts")
        if self._stopping:
            self._log.write(how)
        elif self._pending is not None and self._pending[0] == "drop":
            self._log.write(how)
            self._drop()
            self._start_at = now
        elif status == EXIT_REFUSED and not self._kept:
            self._log.write(f"{how}: the keeper ends, because a restart would fail too", "error")
            self._status = EXIT_REFUSED
        else:
            if server.ready_at is not None or now - server.started >= HEALTHY_S:
                self._backoff.reset()
                self._start_at = now
            else:
                self._start_at = now + self._backoff.delay(now)
            self._log.write(f"{how}; the next start is in {max(self._start_at - now, 0):.1f} s", "error")

    def _refused(self, caller: int, request: dict[str, Any]) -> str | None:
        """Return why a request is refused. Without a reason it has its reply, or gets it later from `_finish`."""
        asked, server = request.get("do"), self._main
        if asked == "status":
            sockets.reply(caller, {"done": True, **self._report()})
            return None
        if asked not in ("drop", "reload"):
            return "unknown request"
        if self._stopping:
            return "the keeper is ending"
        if self._pending is not None:
            return "another --drop or --reload is in progress"
        if asked == "reload":
            if server is None:
                return "no server runs; the next start uses the new version"
            if server.ready_at is None:
                # It may not have stored anything yet: the two would each make an arena.
                return f"the server, process {server.pid}, is not ready yet"
            if self._start(time.monotonic(), TAKEOVER) is None:
                return "the server cannot be started"
        elif server is not None and request.get("restart") is not True:
            return f"the server, process {server.pid}, uses the memory; --drop --restart stops it first"
        self._pending = (asked, caller)
        if asked == "drop" and server is None:
            self._drop()
        elif asked == "drop" and server is not None:
            self._log.write(f"--drop: the server, process {server.pid}, ends and starts with an empty cache")
            self._end(server)
        return None

    def _drop(self) -> None:
        names, nbytes = ", ".join(self._kept) or "no memory", sum(row["bytes"] for row in self._rows())
        text = f"released {names}; another process still uses the memory, which is freed when that process ends"
        freed = 0
        if sd_notify.free_unused(self._kept.values()):
            freed = nbytes - sum(row["bytes"] for row in self._rows())
            text = f"freed {names}, {freed} bytes"
        self._forget_all()
        self._log.write(f"--drop: {text}")
        self._finish("drop", True, text, freed=freed)

    def _rows(self) -> list[dict[str, Any]]:
        """Each kept name, the size of its file, and the bytes of memory that it has."""
        found = {name: os.fstat(fd) for name, fd in self._kept.items()}
        return [{"name": name, "size": of.st_size, "bytes": of.st_blocks * 512} for name, of in found.items()]

    def _finish(self, what: str, done: bool, text: str, **facts: object) -> None:
        """Reply to the caller of a `what` that is under way, if one is."""
        if self._pending is not None and self._pending[0] == what:
            sockets.reply(self._pending[1], {"done": done, "text": text, **facts})
            self._pending = None

    def _report(self) -> dict[str, object]:
        now, server = time.monotonic(), None
        if (main := self._main) is not None:
            server = {"pid": main.pid, "since_s": now - main.started, "ready": main.ready_at is not None}
        return {
            "pid": os.getpid(),
            "server": server,
            "starts": self._starts,
            "last_end": self._last_end,
            "next_start_s": None if self._start_at == math.inf else max(self._start_at - now, 0.0),
            "held": self._rows(),
            "strangers": self._strangers,
        }


# Not with -m, and without an empty path: the working directory is no place for modules.
PATHS = "import sys; sys.path[:] = filter(None, sys.path); "
_PROGRAM = PATHS + "from kvframework.keeper.supervisor import main; sys.exit(main(sys.argv[1]))"


def become_supervisor(command: Sequence[str], base: str, log_form: str, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by one that holds, without the command line's modules. Raises `OSError`."""
    argument = json.dumps({"command": command, "base": base, "log_form": log_form})
    os.execve(sys.executable, [sys.executable, "-c", _PROGRAM, argument], dict(environ))  # noqa: S606


def main(argument: str) -> int:
    """Hold, and return the exit status."""
    options = json.loads(argument)
    lines = Lines(options["log_form"])
    try:
        return FdStoreSupervisor(options["command"], options["base"], lines).run()
    except sockets.AlreadyHeldError as error:
        lines.write(
            f"another `kvframework hold`, process {error}, serves this endpoint; see kvframework hold --status", "error"
        )
    except OSError as error:
        lines.write(f"{options['base']}: {error}", "error")
    return EXIT_REFUSED
