"""The end of a test that does not end: it fails by its name, with the stacks of all threads.

A signal ends what waits in Python or in the kernel. Native code that keeps the main thread is out of its reach: some
time later the process ends, and shows the stacks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

# The frames of each thread that are shown, and the seconds that the process has to end after the tests.
_FRAMES, _END_S = 8, 5.0


class DoesNotEnd(BaseException):
    """A test took too long. No `except Exception` of a plugin catches it; hypothesis does not repeat the example."""


def stacks(threads: Collection[threading.Thread]) -> str:
    """Return the innermost calls of each thread that is running."""
    frames, shown = sys._current_frames(), []
    for thread in threads:
        if (frame := frames.get(thread.ident or 0)) is not None:
            calls = traceback.format_list(traceback.extract_stack(frame)[-_FRAMES:])
            shown.append(f"thread {thread.name}:\n{''.join(calls)}")
    return "\n".join(shown)


class Overdue:
    """Hooks of pytest that limit setup, call and teardown of a kit's tests to `limit_s` seconds each."""

    def __init__(self, kit: type, config: pytest.Config) -> None:
        self._kit = kit
        # By class, the test that did not end.
        self._ended: dict[type, str] = {}
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is None:
            self._stderr = os.dup(2)
        else:
            with capture.global_and_fixture_disabled():
                self._stderr = os.dup(2)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        if (other := self._ended.get(getattr(item, "cls", type(None)))) is not None:
            pytest.skip(f"{other} did not end: the rest of its class is left out")
        __tracebackhide__ = True
        with self._limited(item, "setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        __tracebackhide__ = True
        with self._limited(item, "call"):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        __tracebackhide__ = True
        with self._limited(item, "teardown"):
            return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        left = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
        if left:
            threading.Thread(target=self._end, args=(left, int(exitstatus)), daemon=True).start()

    def _end(self, left: list[threading.Thread], exitstatus: int) -> None:
        """End the process where threads of a plugin keep it from ending, in a thread of its own."""
        threading.main_thread().join()
        deadline = time.monotonic() + _END_S
        for thread in left:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in left):
            os.write(self._stderr, f"threads that do not end keep the process:\n{stacks(left)}\n".encode())
            os._exit(exitstatus or 1)

    @contextmanager
    def _limited(self, item: pytest.Item, step: str) -> Iterator[None]:
        case = getattr(item, "cls", None)
        if case is None or not issubclass(case, self._kit):
            yield
            return
        limit_s, began = float(case.limit_s), time.monotonic()
        others_s = signal.getitimer(signal.ITIMER_REAL)[0]  # pytest-timeout, for example

        def end(_signal: int, _frame: FrameType | None) -> None:
            __tracebackhide__ = True
            self._ended.setdefault(case, item.name)
            others = [each for each in threading.enumerate() if each is not threading.current_thread()]
            told = (
                f"{item.nodeid}: {step} still runs after {limit_s:g} s (`limit_s`): a call does not end, see the"
                f" traceback. Other threads: {stacks(others) or 'none'}"
            )
            # pytest goes on with the other fixtures after an outcome of its own only.
            raise DoesNotEnd(told) if step == "call" else pytest.fail.Exception(told)

        mine = threading.current_thread() is threading.main_thread() and not 0 < others_s <= limit_s
        if mine:
            before = signal.signal(signal.SIGALRM, end)
            # Again and again: what it ends may wait once more on its way out.
            signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
        last_resort = not _has_other_limit(item.config)
        if last_resort:
            faulthandler.dump_traceback_later(2 * limit_s + 3, exit=True, file=self._stderr)
        try:
            yield
        finally:
            if mine:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                if others_s:
                    signal.setitimer(signal.ITIMER_REAL, max(others_s - (time.monotonic() - began), 0.001))
            if last_resort:
                faulthandler.cancel_dump_traceback_later()


def _has_other_limit(config: pytest.Config) -> bool:
    """Whether pytest's own plugin dumps stacks: a process has one such timer."""
    try:
        return float(config.getini("faulthandler_timeout")) > 0
    except (KeyError, ValueError):  # without that plugin
        return False
