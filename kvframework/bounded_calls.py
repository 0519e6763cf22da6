"""The bound on each call of a plugin's code: one that does not return becomes a `PluginBroken` with the plugin's name.

Nothing ends such a call within its process. So a command ends with it (`bounded`), and a server that serves goes on
without it (`call_bounded`). A call that never releases the interpreter's lock stops this, too."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from kvframework.errors import PluginBroken

log = logging.getLogger(__name__)

T = TypeVar("T")
Overdue = Callable[[PluginBroken], None]

# No healthy call takes so long: `create` may start a helper process, which has 30 s. systemd waits 90 s for a start.
BOUND_S = 60.0
_end = os._exit


class _Thread(threading.local):
    overdue: Overdue | None = None
    where = ""
    # The process id of a plugin's call, and the function that makes its error.
    refusal: tuple[int, Callable[[str], PluginBroken]] | None = None


_this = _Thread()


@contextmanager
def bounded(overdue: Overdue | None) -> Iterator[None]:
    """Have `overdue`, unless None, called in another thread with an error, for a plugin's call that takes too long."""
    before, _this.overdue = _this.overdue, overdue
    try:
        yield
    finally:
        _this.overdue = before


@contextmanager
def named_at(where: str) -> Iterator[None]:
    """Give the errors of overdue calls the place that names the plugin."""
    before, _this.where = _this.where, where
    try:
        yield
    finally:
        _this.where = before


@contextmanager
def timed(title: str, step: str) -> Iterator[None]:
    """Time a call of a plugin if this thread is bounded: it prints to standard error then, and cannot end the process
    without a word."""
    if _this.overdue is None:
        yield
        return
    pid = os.getpid()

    def broken(fact: str) -> PluginBroken:
        hint = "report the error to the plugin's author, or choose another plugin"
        return PluginBroken(f"{title}: {step} {fact}", where=_this.where, hint=hint)

    timer = threading.Timer(BOUND_S, _this.overdue, [broken(f"has not returned within {BOUND_S:g} s")])
    timer.daemon = True
    timer.start()
    os._exit = _refusing  # both for good: an overdue call in another thread goes on, and must not take them back
    before, _this.refusal = _this.refusal, (pid, broken)
    if sys.stdout is not None and not isinstance(sys.stdout, _Stdout):  # None: the descriptor was closed
        sys.stdout = _Stdout(sys.stdout)
    try:
        yield
    finally:
        _this.refusal = before
        timer.cancel()
        if os.getpid() != pid:  # else two processes would go on from here
            os.write(2, f"error: {title}: {step} returned in a process that it has forked, which ends\n".encode())
            os._exit(1)


class _Stdout:
    """Standard output; for a plugin's call in this thread, standard error."""

    def __init__(self, stdout: object) -> None:
        self._stdout = stdout

    def __getattr__(self, name: str) -> object:
        return getattr(self._stdout if _this.refusal is None else sys.stderr, name)


def _refusing(status: int) -> NoReturn:
    """End the process; refuse that to a plugin's call in this thread, but not in a child process that it forked."""
    if _this.refusal is not None and _this.refusal[0] == os.getpid():
        raise _this.refusal[1](f"called os._exit({status})")
    _end(status)


def call_bounded(function: Callable[[], T]) -> T:
    """Call `function` in a separate thread. Raises its error, or `PluginBroken` as soon as a plugin's call in it is
    overdue: that thread then goes on, and nothing waits for it."""
    future: Future[T] = Future()

    def run() -> None:
        with bounded(end_with):
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  raised in the thread that waits
                end_with(error)
            else:
                with contextlib.suppress(InvalidStateError):
                    future.set_result(result)

    def end_with(error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):  # it is overdue already
            future.set_exception(error)

    threading.Thread(target=run, name="kvf-plugins", daemon=True).start()
    return future.result()


def call_within(timeout_s: float, calls: Mapping[str, Callable[[], object]]) -> list[str]:
    """Make all `calls` at once, each in its own daemon thread, and wait up to `timeout_s` seconds for them. Returns the
    names of the calls that have not returned, which continue to run. Errors of a call are logged.

    A call for which no thread can be started is skipped, and counts as one that has not returned."""
    threads: dict[str, threading.Thread] = {}
    for name, call in calls.items():
        thread = threading.Thread(target=_logged, args=(name, call), name=f"kvf-end-{name}", daemon=True)
        with contextlib.suppress(RuntimeError):
            thread.start()
            threads[name] = thread
    deadline = time.monotonic() + timeout_s
    for thread in threads.values():
        thread.join(max(deadline - time.monotonic(), 0.0))
    return [name for name in calls if name not in threads or threads[name].is_alive()]


def _logged(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        log.exception("closing failed: %s", name)
