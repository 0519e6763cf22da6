"""The base of every conformance kit: no test hangs, a failure begins with the promise that the plugin broke, which is
the name of the test, and one mistake in a name is one error of the class. Calls run together in threads.

A signal ends what waits in Python or in the kernel. Native code that keeps the main thread is out of its reach: some
time later the process ends, and shows the stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, ClassVar, TypeVar

import pytest

from kvframework.api.plugin import Buffer

# The frames of each thread that are shown, and the seconds that the process has to end after the tests.
_FRAMES, _END_S = 8, 5.0
_LONGEST = 300
T = TypeVar("T")
# Seconds. Frequent switches expose state that threads must not share, and values that are visible too early.
_SWITCH_S = 1e-6
# Steps of a call before which another one runs, and the seconds for which that may wait for a lock of the first.
_STEPS, _LOCKED_S = 1000, 0.05


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


class Hooks:
    """Hooks of pytest for a kit's tests. Setup, call and teardown are limited to `limit_s` seconds each. Where a setup
    fails at the place where that of another test of the class did, the test is skipped, and names the other one. The
    promise stands before the text of an assertion, and an assertion around any other error; an assertion of a kit is
    shown by its text alone, without the values that pytest adds: they may be large."""

    def __init__(self, config: pytest.Config) -> None:
        # By class, the test that did not end.
        self._ended: dict[type, str] = {}
        # The first test by class, type of the error, and the line that raised it.
        self._first: dict[tuple[object, ...], str] = {}
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is None:
            self._stderr = os.dup(2)
        else:
            with capture.global_and_fixture_disabled():
                self._stderr = os.dup(2)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        __tracebackhide__ = True
        if (case := _kit_of(item)) is None:
            return (yield)
        if (other := self._ended.get(case)) is not None:
            pytest.skip(f"{other} did not end: the rest of its class is left out")
        try:
            with self._limited(item, case, "setup"):
                return (yield)
        except pytest.skip.Exception:
            raise
        except (Exception, pytest.fail.Exception) as error:
            *_, place = traceback.extract_tb(error.__traceback__)
            first = self._first.setdefault((case, type(error), place.filename, place.lineno), item.name)
            if first == item.name:
                raise
        pytest.skip(f"its setup fails as that of {first} does, which shows the error")

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        __tracebackhide__ = True
        if (case := _kit_of(item)) is None:
            return (yield)
        promise = item.name.partition("[")[0].removeprefix("test_").replace("_", " ")
        try:
            with self._limited(item, case, "call"):
                return (yield)
        except pytest.skip.Exception:
            raise
        except pytest.fail.Exception as error:
            error.msg = f"{promise}: {error.msg}"
            raise
        except AssertionError as error:
            error.args = (f"{promise}: {_text(error)}",)
            raise
        except Exception as error:
            raise AssertionError(f"{promise}: {_call(error.__traceback__)} raised {shown(error)}") from error

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        __tracebackhide__ = True
        if (case := _kit_of(item)) is None:
            return (yield)
        with self._limited(item, case, "teardown"):
            return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        left = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
        if left:
            threading.Thread(target=self._end, args=(left, int(exitstatus)), daemon=True).start()

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        """Return what differs, where the left side of a comparison knows how to say it (`Answers`)."""
        differs = getattr(left, "differs_from", None)
        return [differs(right)] if op == "==" and differs is not None else None

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
    def _limited(self, item: pytest.Item, case: type[Kit], step: str) -> Iterator[None]:
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


def _kit_of(item: pytest.Item) -> type[Kit] | None:
    case = getattr(item, "cls", None)
    return case if case is not None and issubclass(case, Kit) else None


def _has_other_limit(config: pytest.Config) -> bool:
    """Whether pytest's own plugin dumps stacks: a process has one such timer."""
    try:
        return float(config.getini("faulthandler_timeout")) > 0
    except (KeyError, ValueError):  # without that plugin
        return False


def interleaved(work: Callable[[], T], other: Callable[[], object]) -> T:
    """Return what `work` returns. Before each of its steps, instructions of Python, `other` runs as a whole in another
    thread: it writes over what the call keeps in its object for an instant."""
    others: list[threading.Thread] = []

    def step(frame: FrameType, event: str, _arg: object) -> Callable[..., Any] | None:
        frame.f_trace_opcodes = True
        if event == "opcode" and not (others and others[-1].is_alive()):
            others.append(threading.Thread(target=other, daemon=True))
            others[-1].start()
            others[-1].join(_LOCKED_S)
        return step if len(others) < _STEPS else None

    before = sys.gettrace()
    sys.settrace(step)
    try:
        return work()
    finally:
        sys.settrace(before)


def together(works: Sequence[Callable[[], object]], within_s: float) -> None:
    """Run `works` at the same time, with frequent switches between them. Raises the first error that one of them
    raised; fails if one does not end within `within_s` seconds."""
    raised: list[BaseException] = []
    begin = threading.Barrier(len(works), timeout=within_s)

    def run(work: Callable[[], object]) -> None:
        try:
            begin.wait()
            work()
        except BaseException as error:  # noqa: BLE001  raised again in the test's own thread
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + within_s
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
    finally:
        sys.setswitchinterval(before)
    if raised:
        raise raised[0]
    if running := [thread for thread in threads if thread.is_alive()]:
        pytest.fail(f"a call does not end within {within_s:g} s:\n{stacks(running)}", pytrace=False)


def _text(error: AssertionError) -> str:
    """Return the text of an assertion; of one of a kit the first part, which its author wrote."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not _is_of_a_kit(frame.f_globals.get("__name__", "")):
        return str(error)
    text = str(error)
    if text.startswith("assert "):
        return text.removeprefix("assert ").partition("\n")[0]
    return text.partition("\nassert ")[0]


def _call(trace: TracebackType | None) -> str:
    """Return the name of the call from the kit to the plugin in which an error was raised."""
    modules = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame, _ in traceback.walk_tb(trace)]
    kit = [at for at, (module, _) in enumerate(modules) if _is_of_a_kit(module)]
    return modules[kit[-1] + 1][1] if kit and kit[-1] + 1 < len(modules) else "a call"


def shown(error: Exception) -> str:
    """Return an error in words, without the bytes of a key."""
    if any(isinstance(each, bytes | bytearray | memoryview) for each in error.args):
        return f"{type(error).__name__} ({', '.join(map(_named, error.args))})"
    return f"{type(error).__name__}: {str(error)[:_LONGEST]}"


def _named(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes | bytearray | memoryview) else str(value)[:_LONGEST]


def _is_of_a_kit(module: str) -> bool:
    return module.startswith("kvf_dev.testing.")


def held(*, mappings: bool = False) -> set[str]:
    """Return what this process holds: threads, open descriptors, and perhaps shared mappings."""
    found = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add(f"descriptor {number} ({os.readlink(f'/proc/self/fd/{number}')})")
    if mappings:
        with open("/proc/self/maps") as file:
            found |= {f"mapping {line.split()[0]}" for line in file if line.split(None, 2)[1].endswith("s")}
    return found


def wait_until(condition: Callable[[], object], what: str, timeout: float = 20.0) -> None:
    """Return once `condition()` is true; fail after `timeout` seconds."""
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            pytest.fail(f"{what} did not come true within {timeout:g} s")
        time.sleep(0.005)


def must_be_equal(found: Buffer, wanted: Buffer, why: str) -> None:
    """Fail unless these bytes are equal; shows the first difference, since they may be many."""
    __tracebackhide__ = True
    if found != wanted:
        one, other = memoryview(found), memoryview(wanted)
        at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        there, right = bytes(one[at : at + 20]), bytes(other[at : at + 20])
        pytest.fail(f"{why}: from byte {at} of {len(other)} on {there!r}, not {right!r}")


def must_refuse(
    what: str, call: Callable[[], T], error: type[Exception], *, unless: Callable[[T], bool] = lambda _: False
) -> None:
    """Fail unless `call` raises `error`, or answers what is as good."""
    __tracebackhide__ = True
    try:
        answer = call()
    except error:
        return
    except Exception as other:  # noqa: BLE001  any other is the bug
        pytest.fail(f"{what} raises {type(other).__name__} instead of {error.__name__}: {str(other)[:_LONGEST]}")
    if not unless(answer):
        pytest.fail(f"{what} raises no {error.__name__}")


class Kit:
    """Base class of the kits' test classes. pytest's own collection of them installs the hooks that they need."""

    limit_s: ClassVar[float] = 60.0
    """Seconds after which a test, or its setup or teardown, is ended and fails with the stacks of all threads. The rest
    of its class is then skipped."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        plugins = metafunc.config.pluginmanager
        if not plugins.has_plugin(__name__):
            plugins.register(Hooks(metafunc.config), __name__)

    def grown(self, work: Callable[[int], object], times: int, before: int) -> int:
        """Return by how many bytes the memory grows while `work` is repeated `times` times, after `before` times."""
        tracemalloc.start()
        try:
            for index in range(before):
                work(index)
            held = tracemalloc.get_traced_memory()[0]
            for index in range(times):
                work(index)
            return tracemalloc.get_traced_memory()[0] - held
        finally:
            tracemalloc.stop()

    def must_behave(self, machine: type[Any], *, examples: int, steps: int) -> None:
        """Run a state machine of hypothesis in that many sequences of that many steps."""
        from hypothesis import HealthCheck, Phase, settings
        from hypothesis.stateful import run_state_machine_as_test

        # Some releases of hypothesis have no types for it.
        run_state_machine_as_test(  # type: ignore[no-untyped-call, unused-ignore]
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                phases=(Phase.reuse, Phase.generate, Phase.shrink),
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )

    def in_threads(self, *works: Callable[[], object], within_s: float = 30.0) -> None:
        """Run `works` at the same time. Raises the first error that one of them raised; fails if one does not end."""
        together(works, within_s)
