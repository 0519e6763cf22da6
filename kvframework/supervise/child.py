"""Child processes: their start, their end, one that a thread keeps running, a plugin's code in a fresh interpreter,
with a deadline, and the function and options that a process gives to its child by their names."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import msgspec

from kvframework.errors import PluginBroken
from kvframework.supervise.state import Supervision, how_ended

# The paths of this process and no others: with -m the working directory would be the first.
_PROGRAM = (
    "import sys; at = {count} + 1; sys.path[:] = sys.argv[at:]; "
    "from {module} import main; sys.exit(main(sys.argv[1:at]))"
)
# How long a process may take to end, by itself or when it is stopped.
STOP_S = 1.0
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 2000


def start_process(module: str, *arguments: str, fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a process that runs `main` of `module` with the list of `arguments`. It inherits `fds`, and has this
    process's module search path. The thread that calls has to live as long as the child, see `end_with_parent`. Raises
    the errors of `subprocess.Popen`."""
    program = _PROGRAM.format(module=module, count=len(arguments))
    command = [sys.executable, "-c", program, *arguments, *sys.path]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)


def start_connected(module: str, *fds: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process as `start_process` does, and return it with this end of a socket. The arguments of `main` are the
    number of the other end, then those of `fds`, which are borrowed."""
    ours, theirs = socket.socketpair()
    with theirs:
        numbers = (theirs.fileno(), *fds)
        try:
            return start_process(module, *map(str, numbers), fds=numbers), ours
        except BaseException:
            ours.close()
            raise


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process as soon as the thread that started it has ended for any reason. `parent` is the
    id of its process, which may have ended before this call; None: the child notices that by other means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


class Ran(NamedTuple):
    """The result of an isolated run: the lines of its report, why it ended ("" if regular), and its last output."""

    lines: list[bytes]
    ended: str
    printed: str


# Written at the end of a run; if it is missing, a plugin's code has ended the process.
_END = b"end\n"


def run_isolated(
    module: str, request: bytes, *, deadline_s: float, arguments: Sequence[str] = (), function: str = "main"
) -> Ran:
    """Call `function` of `module` with the arguments FD and `arguments` and `request` as standard input, and kill it,
    with all its child processes, after `deadline_s` seconds. Blocks.

    FD is the descriptor of a file for the report: lines before a crash or a hang are not lost. The run has this
    process's module search path, and ends without the interpreter's own end: a native library's thread that asks for
    the interpreter then aborts the process, and a plugin's thread that does not end would keep it alive."""
    program = (
        f"import os, sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}(); "
        f"sys.stdout.flush(); sys.stderr.flush(); os.write(int(sys.argv[1]), {_END!r}); os._exit(0)"
    )
    with tempfile.TemporaryFile() as report, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as wanted:
        wanted.write(request)
        wanted.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(report.fileno()), *arguments],
            stdin=wanted,
            stdout=printed,
            stderr=printed,
            pass_fds=[report.fileno()],
            start_new_session=True,
        )
        try:
            status = process.wait(deadline_s)
            ended = f"ended the interpreter with status {status}" if status else ""
            if status < 0:
                ended = f"was ended {how_ended(status)}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {deadline_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = _all(printed.fileno())[-_TAIL_BYTES:].decode(errors="replace")
        written = _all(report.fileno())
        if not ended and not written.endswith(_END):
            ended = "ended the interpreter with status 0"
        return Ran(written.removesuffix(_END).splitlines(), ended, said)


def _all(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


class SupervisedChild:
    """One process at a time, which a separate thread starts, watches, starts again after a back-off, and stops. A
    base class: the methods from `wanted` to `ended` are called in that thread, and all but `spawn` have a default.

    `title` names the process in log lines. It is killed if `ready` is not called within `ready_s` seconds of its start,
    or if it has not ended `stop_s` seconds after `stop`. Public attributes may be read in any thread."""

    def __init__(self, title: str, *, thread: str, ready_s: float = math.inf, stop_s: float = STOP_S) -> None:
        self.title = title
        self.pid: int | None = None
        self.starts, self.last_error, self.stopping = 0, "", False
        self._stop_s, self._ready_s = stop_s, ready_s
        self._machine = Supervision(ready_s)
        self._why = ""
        self._held = False  # whether `hang_up` is still to be called
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._log = logging.getLogger(type(self).__module__)
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)

    def wanted(self) -> bool:
        """Whether a process is to be started, now that there is none."""
        return True

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start a process. Whatever it raises is an end, and tried again."""
        raise NotImplementedError

    def watch(self, poller: select.poll) -> float:
        """Register what calls `serve` beside the process's end and `wake`; return when it is called in any case."""
        del poller
        return math.inf

    def serve(self, happened: dict[int, int]) -> str | None:
        """Handle what `poll` says of descriptors. Return None to go on, "" for a process that ends by itself, or why it
        has to be killed, as a sentence."""
        del happened
        return None

    def hang_up(self, popen: subprocess.Popen[bytes]) -> None:
        """Ask the process to end, or close what leads to it. Called once, also if it has ended."""
        popen.terminate()

    def ended(self, why: str) -> None:
        """Handle the end of a process, which touches nothing any more, or that it could not be started. The last call
        follows on `stop`, with ""."""
        if why:
            self._log.error("%s", why)

    # of any thread

    def start(self) -> None:
        """Start the thread that keeps the process running. Does not wait for it."""
        self._thread.start()

    def wake(self) -> None:
        """Have `wanted` or `serve` called soon."""
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Have the process ended, and start none any more. Idempotent. Does not wait."""
        self.stopping = True
        self.wake()

    def join(self, timeout_s: float) -> bool:
        """Wait, after `stop`, for the end of the process; False if the kernel holds it for longer."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def ready(self) -> None:
        """Note that the process is ready. From `serve`."""
        if self._machine.life is not None:
            self._machine.life.ready(time.monotonic())

    @property
    def is_ready(self) -> bool:
        """Whether the process is ready, and does not have to stop."""
        life = self._machine.life
        return life is not None and life.ready_at is not None and not life.stopping

    # the thread

    def _run(self) -> None:
        while not self._machine.is_over:
            serving, now = self._machine.is_serving, time.monotonic()
            if self._machine.must_start(now):
                self._start()
            elif self._machine.must_kill(now):
                late = f"not ready within {self._ready_s:g} s" if serving else "did not end"
                self._why = self._why or f"{self.title} was killed: {late}"
                self._let_go(kill=True)
            else:
                self._wait()
        self.ended("")

    def _start(self) -> None:
        self._machine.started(time.monotonic())
        try:
            popen = self.spawn()
        except Exception as error:  # noqa: BLE001  the thread has to go on: others wait for it
            self._machine.ended(time.monotonic())
            self.last_error = f"{self.title} cannot be started: {error}"
            self.ended(self.last_error)
            return
        self._popen, self._pidfd = popen, os.pidfd_open(popen.pid)
        self._why, self._held = "", True
        self.pid = popen.pid
        self.starts += 1
        self._log.info("%s is process %d, start %d", self.title, popen.pid, self.starts)

    def _wait(self) -> None:
        """Wait until something happens, and handle it."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        serving, soon = self._machine.is_serving, math.inf
        if self._popen is not None:
            poller.register(self._pidfd, select.POLLIN)
            soon = self.watch(poller) if serving else soon
        elif not self.stopping and self.wanted():
            self._machine.want()
        due = min(self._machine.due, soon)
        happened = dict(poller.poll(None if due == math.inf else max(due - time.monotonic(), 0.0) * 1000 + 1))
        if happened.pop(self._wake, 0):
            os.eventfd_read(self._wake)
        has_ended = happened.pop(self._pidfd, 0)
        if self.stopping:
            self._machine.close(time.monotonic(), self._stop_s)
            self._let_go()
        elif serving and (happened or not has_ended):
            # A process that has ended may have left messages to read.
            self._serve(happened)
            has_ended = has_ended and not happened
        if has_ended:
            self._end()

    def _serve(self, happened: dict[int, int]) -> None:
        try:
            why = self.serve(happened)
        except Exception as failure:  # noqa: BLE001  the thread has to go on: others wait for it
            self._log.exception("the connection to %s failed", self.title)
            why = f"the connection to {self.title} failed: {failure}"
        if why is not None:
            self._why = why
            if self._machine.life is not None:
                self._machine.life.stop(time.monotonic(), STOP_S)
            self._let_go(kill=bool(why))

    def _let_go(self, *, kill: bool = False) -> None:
        if self._popen is not None:
            if self._held:
                self._held = False
                self.hang_up(self._popen)
            if kill:
                self._popen.kill()

    def _end(self) -> None:
        self._let_go()
        assert self._popen is not None
        how = how_ended(self._popen.wait())
        os.close(self._pidfd)
        self._popen, self._pidfd, self.pid = None, -1, None
        self._machine.ended(time.monotonic())
        if not self.stopping:
            self.last_error = self._why or f"{self.title} ended {how}"
            self.ended(self.last_error)

    def __del__(self) -> None:
        if getattr(self, "_wake", -1) >= 0:
            os.close(self._wake)


# Names of functions pass from a process to the one that it starts, over what it opened, and never come from a client.


class NamedCall(msgspec.Struct, frozen=True, array_like=True):
    """A function, and the options that are its first argument: "module:name" of both, and msgpack of the options."""

    function: str
    options_type: str
    options: bytes

    def __repr__(self) -> str:
        return f"NamedCall({self.function!r}, {self.options_type!r})"  # options may hold secrets

    @classmethod
    def of(cls, function: Callable[..., object], options: msgspec.Struct, *, where: str) -> NamedCall:
        """Raise `PluginBroken`, with `where`, for a function or options that another process could not make."""
        kind = type(options).__qualname__
        if not isinstance(options, msgspec.Struct):
            hint = "derive the options from kvframework.api.plugin.Options"
            raise PluginBroken(f"the options have type {kind}", where=where, available="a struct", hint=hint)
        names = _name(function, where), _name(type(options), where)
        try:
            call = cls(*names, msgspec.msgpack.encode(options, enc_hook=plain))
            call._unpacked(type(options))
        except (msgspec.MsgspecError, NotImplementedError, TypeError) as error:
            fact = f"{kind} cannot be sent to another process: {error}"
            hint = "use field types that msgspec knows, or ByteSize"
            raise PluginBroken(fact, where=where, hint=hint) from error
        return call

    def resolve(self) -> tuple[Callable[..., Any], Any]:
        """Import the function, and make the options. Blocking, and raises what foreign modules raise."""
        function, options_type = resolve_name(self.function), resolve_name(self.options_type)
        return function, self._unpacked(options_type)

    def _unpacked(self, options_type: Any) -> Any:
        return msgspec.msgpack.decode(self.options, type=options_type, dec_hook=_number)


def plain(value: object) -> object:
    """Return a number of a type of its own, such as `ByteSize`, as an integer: a hook of msgspec's encoders."""
    if isinstance(value, int):
        return int(value)
    raise NotImplementedError(f"{type(value).__name__} is not a supported type for an option")


def _number(kind: type, value: object) -> object:
    if issubclass(kind, int) and isinstance(value, int):
        return kind(value)
    raise NotImplementedError(f"{kind.__name__} is not a supported type for an option")


def _name(thing: Callable[..., object] | type, where: str) -> str:
    module, name = getattr(thing, "__module__", None) or "", getattr(thing, "__qualname__", "")
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not thing or module == "__main__":
        raise PluginBroken(
            f"{name or repr(thing)} of {module or 'no module'} cannot be found by its name",
            where=where,
            available="a function or class at the top of an importable module",
            hint="define the function or class at the top of a module, and pass its arguments as options",
        )
    return f"{module}:{name}"
