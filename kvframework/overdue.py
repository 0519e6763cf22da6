"""The bound on each call of a plugin's code: one that does not return becomes a `PluginBroken` with the plugin's name.

Nothing ends such a call within its process. So a command ends with it (`bounded`), and a server that serves goes on
without it (`call_bounded`). A call that never releases the interpreter's lock stops this, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

from kvframework.errors import PluginBroken

T = TypeVar("T")
Overdue = Callable[[PluginBroken], None]

# Hooks, `probe` and `check` are to be quick. An import may read a cold disk, and `create` start a helper process, which
# has 30 s.
QUICK_S, LONG_S = 20.0, 60.0


class _Thread(threading.local):
    overdue: Overdue | None = None
    where = ""


_this = _Thread()


@contextmanager
def bounded(overdue: Overdue | None) -> Iterator[None]:
    """Have `overdue` called, in another thread, with the error for a plugin's call of this thread that takes too long.
    None: calls are not timed."""
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
def timed(title: str, step: str, *, long: bool = False) -> Iterator[None]:
    """Time a call of a plugin, by `LONG_S` or `QUICK_S`, if this thread is bounded."""
    overdue = _this.overdue
    if overdue is None:
        yield
        return
    seconds = LONG_S if long else QUICK_S
    error = PluginBroken(
        f"{title}: {step} has not returned within {seconds:g} s",
        where=_this.where,
        hint="report it to the plugin's author, or choose another plugin",
    )
    timer = threading.Timer(seconds, overdue, (error,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def call_bounded(function: Callable[[], T]) -> T:
    """Call `function` in a thread of its own. Raises its error, or `PluginBroken` as soon as a plugin's call in it is
    overdue: that thread then goes on, and nothing waits for it."""
    ends: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def end_with(error: BaseException) -> None:
        def fail() -> T:
            raise error

        ends.put(fail)

    def run() -> None:
        with bounded(end_with):
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  raised in the thread that waits
                end_with(error)
            else:
                ends.put(lambda: result)

    threading.Thread(target=run, name="kvf-plugins", daemon=True).start()
    return ends.get()()
