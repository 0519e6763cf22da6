"""The process of `kvframework hold`: a server as its child, and an fd store for it. No plugin, no thread."""

from __future__ import annotations

import contextlib
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

from kvframework.keeper.fd_store import FdStore
from kvframework.keeper.server_process import Server, exit_status, memory_kills, start_server
from kvframework.keeper.sockets import (
    CONTROL_SUFFIX,
    NOTE_SUFFIX,
    AlreadyHeldError,
    Caller,
    ControlSocket,
    NoteSocket,
    Received,
    heard_signals,
    locked,
)
from kvframework.supervise.state import HEALTHY_S, Backoff, how_ended

_STDERR = 2
_LOGGER = "kvframework.hold"
_MAX_TEXT = 2000  # a pipe takes a line of less than PIPE_BUF bytes as a whole


class Lines:
    """Writes lines in the form of the server's log, "human" or "json". A reader that does not read loses them: it never
    holds this process up."""

    def __init__(self, form: str) -> None:
        self._json = form == "json"
        self._fd = _STDERR
        self.dropped = 0
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(_STDERR).st_mode):
                # An open file of its own: not blocking here leaves it as it is for all others.
                self._fd = os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)

    def info(self, text: str) -> None:
        self._write("info", text)

    def warning(self, text: str) -> None:
        self._write("warning", text)

    def error(self, text: str) -> None:
        self._write("error", text)

    def _write(self, level: str, text: str) -> None:
        now, text = datetime.now(timezone.utc), text[:_MAX_TEXT]
        if self._json:
            time = now.isoformat(timespec="milliseconds")
            line = json.dumps({"time": time, "level": level, "logger": _LOGGER, "message": text})
        else:
            local = now.astimezone()
            line = f"{local:%Y-%m-%d %H:%M:%S},{local.microsecond // 1000:03d} {level.upper()} {_LOGGER}: {text}"
        try:
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            if not any(event & select.POLLOUT for _, event in poll.poll(0)):
                raise BlockingIOError
            os.write(self._fd, f"{line}\n".encode("utf-8", "backslashreplace"))
        except OSError:
            self.dropped += 1


TAKEOVER = "--takeover"
# A server ends within 5 s of a signal.
STOP_S = 8.0
EXIT_REFUSED = 2
STDERR = 2
_NOTES_AT_ONCE = 64
_PASSED_ON = (signal.SIGHUP, signal.SIGUSR1)
_ENDING = (signal.SIGINT, signal.SIGTERM)


class FdStoreSupervisor:
    """Keeps one server running until SIGINT or SIGTERM, and what it stores until then.

    `command` starts a server; with `TAKEOVER` as a further argument, one that takes over from another. `base` is the
    path that the sockets' names begin with, in an existing directory where no other user may write.
    """

    def __init__(self, command: Sequence[str], base: str, lines: Lines) -> None:
        self._command = command
        self._base = base
        self._log = lines
        self._store = FdStore()
        self._servers: dict[int, Server] = {}
        self._main: Server | None = None
        self._backoff = Backoff()
        self._start_at = math.inf
        self._starts = 0
        self._last_end = ""
        self._strangers = 0
        self._memory_kills = memory_kills()
        self._stopping = False
        self._has_terminal = os.isatty(STDERR)
        self._status: int | None = None
        self._waiting: dict[str, list[Caller]] = {"drop": [], "reload": []}

    def run(self) -> int:
        """Run until a signal has ended the server, and return the exit status for this process. In the main thread.
        Raises `AlreadyHeldError`, and `OSError` for sockets that cannot be made."""
        with ExitStack() as stack:
            stack.callback(self._store.clear)
            stack.enter_context(locked(self._base))
            self._notes = NoteSocket(self._base + NOTE_SUFFIX)
            stack.callback(self._notes.close)
            self._control = ControlSocket(self._base + CONTROL_SUFFIX)
            stack.callback(self._control.close)
            self._signals = stack.enter_context(heard_signals((*_ENDING, *_PASSED_ON, signal.SIGCHLD)))
            self._start_at = -math.inf
            while self._status is None:
                self._time(time.monotonic())
                self._wait(time.monotonic())
                self._hear(_NOTES_AT_ONCE)
                self._hear_signals()
                self._reap()
                for caller, request in self._control.requests(time.monotonic()):
                    self._answer(caller, request)
            return self._status

    # what time brings

    def _wait(self, now: float) -> None:
        poll = select.poll()
        poll.register(self._notes, select.POLLIN)
        poll.register(self._signals, select.POLLIN)
        self._control.register(poll)
        times = [self._start_at, *(server.kill_at for server in self._servers.values())]
        times += [caller.ask_by for caller in self._control.callers if not caller.asked]
        first = min(times)
        poll.poll(None if first == math.inf else max(first - now, 0) * 1000 + 1)

    def _time(self, now: float) -> None:
        if now >= self._start_at:
            self._start_at = math.inf
            self._main = self._start(now)
        for server in self._servers.values():
            if server.must_be_killed(now):
                self._log.error(f"the server, process {server.pid}, did not end in time, and is killed")
                server.send(signal.SIGKILL)

    def _start(self, now: float, *further: str) -> Server | None:
        kept = self._store.items()
        try:
            pid = start_server([*self._command, *further], os.environ, kept, self._base + NOTE_SUFFIX)
        except OSError as error:
            self._log.error(f"no server can be started: {error.strerror}")
            if not further:
                self._start_at = now + self._backoff.delay(now)
            return None
        self._starts += 1
        names = ", ".join(name for name, _ in kept) or "nothing"
        self._log.info(f"server is process {pid}, start {self._starts}; kept: {names}")
        server = self._servers[pid] = Server(pid, now, takeover=bool(further))
        return server

    # what servers say

    def _hear(self, most: int) -> None:
        for _ in range(most):
            received = self._notes.receive()
            if received is None:
                return
            self._obey(received)

    def _obey(self, received: Received) -> None:
        pid, note, fd = received.pid, received.note, received.fd
        server = self._servers.get(pid)
        if server is not None and note.store and note.name and fd is not None:
            if self._store.put(note.name, fd):
                self._log.info(f"keeps {note.name} of process {pid}")
            else:
                self._log.error(f"does not keep {note.name} of process {pid}: there are {len(self._store)} others")
            return
        if fd is not None:
            os.close(fd)
        if server is None:
            self._strangers += 1
            if self._strangers & (self._strangers - 1) == 0:  # the 1st, 2nd, 4th, ...
                self._log.warning(
                    f"ignored process {pid} of uid {received.uid}: {self._strangers} such messages in all"
                )
            return
        if note.remove and note.name and self._store.remove(note.name):
            self._log.info(f"keeps {note.name} no longer")
        if note.ready and server.ready_at is None:
            self._is_ready(server)

    def _is_ready(self, server: Server) -> None:
        now = time.monotonic()
        server.ready(now)
        took_over, server.takeover = server.takeover, False
        self._log.info(f"server, process {server.pid}, is ready after {now - server.started:.2f} s")
        if took_over:
            if self._main is not None and self._main is not server:
                self._end(self._main, now)
            self._main = server
            self._reply("reload", True, f"process {server.pid} has taken over")

    # what signals bring

    def _hear_signals(self) -> None:
        try:
            numbers = self._signals.recv(64)
        except BlockingIOError:
            return
        for number in numbers:
            if number in _ENDING:
                self._stop(signal.Signals(number))
            elif number == signal.SIGHUP and self._has_terminal and not os.isatty(STDERR):
                self._stop(signal.SIGTERM)  # the terminal has closed
            elif number in _PASSED_ON and self._main is not None:
                self._main.send(number)

    def _stop(self, number: signal.Signals) -> None:
        now = time.monotonic()
        self._log.info(f"{number.name}: the server ends, and what is kept with it")
        self._stopping, self._start_at = True, math.inf
        for what in self._waiting:
            self._reply(what, False, "the keeper ends")
        for server in self._servers.values():
            server.stop(now, STOP_S)
            server.send(number)
        if not self._servers:
            self._status = 0

    def _end(self, server: Server, now: float) -> None:
        server.stop(now, STOP_S)
        server.send(signal.SIGTERM)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                # It says nothing more, and what it said before its end counts. What others said may have this one sent
                # a signal: it has its number until it is reaped.
                self._hear(1 << 16)
                pid, status = os.waitpid(ended.si_pid, 0)
                if pid in self._servers:
                    self._ended(self._servers.pop(pid), status)

    def _ended(self, server: Server, status: int) -> None:
        now = time.monotonic()
        how = f"server, process {server.pid}, ended {how_ended(os.waitstatus_to_exitcode(status))}{self._why(status)}"
        if server is self._main:
            self._last_end = how
            successor = next((each for each in self._servers.values() if each.takeover), None)
            self._main = successor
            if successor is not None:
                if not self._stopping:
                    successor.kill_at = math.inf
                self._log.info(f"{how}; process {successor.pid} takes over")
                return
            self._after_end(server, status, now, how)
        else:
            beside = server.takeover and self._main is not None
            self._log.info(f"{how}{' before it was ready: the old one stays' if beside else ''}")
            if beside:
                self._reply(
                    "reload", False, f"{how} before it was ready: the old one stays; the log of the keeper says why"
                )
        if self._stopping and not self._servers:
            self._status = exit_status(status)

    def _after_end(self, server: Server, status: int, now: float, how: str) -> None:
        if server.takeover:
            self._reply("reload", False, f"{how} before it was ready, and the old one has ended: it starts again")
        if self._stopping:
            self._log.info(how)
        elif self._waiting["drop"]:
            self._log.info(how)
            self._drop()
            self._start_at = now
        elif exit_status(status) == EXIT_REFUSED and not len(self._store):
            self._log.error(f"{how}: a restart does not help, and nothing is kept")
            self._status = EXIT_REFUSED
        else:
            if server.ready_at is not None or now - server.started >= HEALTHY_S:
                self._backoff.reset()
                self._start_at = now
            else:
                self._start_at = now + self._backoff.delay(now)
            self._log.error(f"{how}; the next start is in {max(self._start_at - now, 0):.1f} s")

    def _why(self, status: int) -> str:
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            return ""
        before, self._memory_kills = self._memory_kills, memory_kills()
        if before is None or self._memory_kills is None or self._memory_kills <= before:
            return ""
        return ": the kernel killed it for lack of memory"

    # what callers ask

    def _answer(self, caller: Caller, request: dict[str, Any]) -> None:
        asked = request.get("do")
        if asked == "status":
            self._control.reply(caller, {"done": True, **self._report()})
        elif not isinstance(asked, str) or asked not in self._waiting:
            self._refuse(caller, "it knows no such request")
        elif self._stopping:
            self._refuse(caller, "the keeper ends")
        elif any(self._waiting.values()):
            self._refuse(caller, "another --drop or --reload is under way")
        elif asked == "drop":
            self._begin_drop(caller, restart=request.get("restart") is True)
        else:
            self._begin_reload(caller)

    def _begin_drop(self, caller: Caller, *, restart: bool) -> None:
        if self._main is not None and not restart:
            self._refuse(
                caller, f"the server, process {self._main.pid}, uses what is kept; --drop --restart ends it first"
            )
            return
        self._waiting["drop"].append(caller)
        if self._main is None:
            self._drop()
        else:
            self._log.info(f"--drop: the server, process {self._main.pid}, ends and starts cold")
            self._end(self._main, time.monotonic())

    def _drop(self) -> None:
        names = ", ".join(name for name, _ in self._store.items()) or "nothing"
        freed = self._store.free()
        self._store.clear()
        if freed is None:
            text = f"keeps {names} no longer, which another process uses: the memory is free when that ends"
        else:
            text = f"freed {names}, {freed} bytes"
        self._log.info(f"--drop: {text}")
        self._reply("drop", True, text, freed=freed or 0)

    def _begin_reload(self, caller: Caller) -> None:
        now = time.monotonic()
        if self._main is None:
            self._refuse(caller, "no server runs: the next start has the new version")
            return
        if self._main.ready_at is None:
            # It may not have stored anything yet: the two would each make an arena.
            self._refuse(caller, f"the server, process {self._main.pid}, has only just started: it is not ready yet")
            return
        server = self._start(now, TAKEOVER)
        if server is None:
            self._refuse(caller, "no server can be started")
            return
        self._waiting["reload"].append(caller)

    def _refuse(self, caller: Caller, why: str) -> None:
        self._control.reply(caller, {"done": False, "text": why})

    def _reply(self, what: str, done: bool, text: str, **facts: object) -> None:
        callers, self._waiting[what] = self._waiting[what], []
        for caller in callers:
            self._control.reply(caller, {"done": done, "text": text, **facts})

    def _report(self) -> dict[str, object]:
        now, server = time.monotonic(), self._main
        return {
            "pid": os.getpid(),
            "server": None
            if server is None
            else {"pid": server.pid, "since_s": now - server.started, "ready": server.ready_at is not None},
            "starts": self._starts,
            "last_end": self._last_end,
            "next_start_s": None if self._start_at == math.inf else max(self._start_at - now, 0.0),
            "held": self._store.report(),
            "strangers": self._strangers,
        }


# Not with -m, and without an empty path: the working directory is no place for modules.
PATHS = "import sys; sys.path[:] = filter(None, sys.path); "
_PROGRAM = PATHS + "from kvframework.keeper.supervisor import main; sys.exit(main(sys.argv[1]))"


def become_supervisor(command: Sequence[str], base: str, log_form: str, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by one that holds, with the arguments of `FdStoreSupervisor`: none of the command line's
    modules stays in it. Raises `OSError`."""
    argument = json.dumps({"command": command, "base": base, "log_form": log_form})
    os.execve(sys.executable, [sys.executable, "-c", _PROGRAM, argument], dict(environ))  # noqa: S606


def main(argument: str) -> int:
    """Hold, and return the exit status."""
    options = json.loads(argument)
    lines = Lines(options["log_form"])
    try:
        return FdStoreSupervisor(options["command"], options["base"], lines).run()
    except AlreadyHeldError as error:
        lines.error(f"another `kvframework hold`, process {error}, keeps the server at this endpoint; --status asks it")
    except OSError as error:
        lines.error(f"{options['base']}: {error}")
    return EXIT_REFUSED
