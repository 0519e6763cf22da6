"""The base of every conformance kit: no test hangs, calls run together in threads, a kit makes the plugin that it tests
by name, as a server does, and the checks that several kits share.

A signal ends what waits in Python or in the kernel. Native code that keeps the main thread is out of its reach: some
time later the process ends, and shows the stacks.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import importlib
import json
import operator
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TypeVar

import pytest
from _pytest.outcomes import OutcomeException

from kvframework import __version__
from kvframework.api.plugin import Buffer, Provider
from kvframework.config.schema import PluginTable
from kvframework.errors import PluginUnavailable
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import resolve_table

# The frames of each thread that are shown, and the seconds that the process has to end after the tests.
_FRAMES, _END_S = 8, 5.0
_LONGEST = 300
T = TypeVar("T")
_PROBE_S = 0.02
# The seconds taken and allowed, by the class and what was measured.
_BUDGETS: dict[tuple[type, str], tuple[float, float]] = {}
# Seconds. Frequent switches expose state that threads must not share, and values that are visible too early.
_SWITCH_S = 1e-6
# Steps of a call before which another one runs, and the seconds for which that may wait for a lock of the first.
_STEPS, _LOCKED_S = 1000, 0.05

_BY_NAME = """
from kvframework.registry.registry import PluginRegistry
registry = PluginRegistry()
provider = registry.resolve({kind!r}, {use!r})
made = provider.create(registry.options(provider, {options!r}, where="the kit"))
"""
_BY_STATE = """
import importlib, operator
made = object.__new__(operator.attrgetter({qualname!r})(importlib.import_module({module!r})))
made.__dict__.update({state!r})
"""


class DoesNotEnd(OutcomeException):
    """A test took too long. No `except Exception` of a plugin catches it; hypothesis does not repeat the example."""


def stacks(threads: Collection[threading.Thread]) -> str:
    frames, shown = sys._current_frames(), []
    for thread in threads:
        if (frame := frames.get(thread.ident or 0)) is not None:
            calls = traceback.format_list(traceback.extract_stack(frame)[-_FRAMES:])
            shown.append(f"thread {thread.name}:\n{''.join(calls)}")
    return "\n".join(shown)


@dataclass
class Ran:
    """The outcomes of a class's tests: `skipped` counts by reason, `failed` by test."""

    seconds: float = 0.0
    passed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


class Hooks:
    """Hooks of pytest that limit each test of a kit, and its setup and teardown, to `limit_s` seconds, end a cascade of
    failures, and sum up at the end: in words, and as JSON in the file that $KVF_KIT_REPORT names."""

    def __init__(self, config: pytest.Config) -> None:
        self._ended: dict[type, str] = {}  # by class, the test that did not end
        self._ran: dict[type[Kit], Ran] = {}
        capture = config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            self._stderr = os.dup(2)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        if (case := _kit_of(item)) in self._ended:
            pytest.skip(f"{self._ended[case]} did not end, so the other tests of its class are skipped")
        if case is not None and len(failed := self._ran.setdefault(case, Ran()).failed) >= case.stop_after:
            pytest.skip(f"Skipped until {', '.join(failed)} pass: `stop_after` is {case.stop_after}")
        with self._limited(item):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._limited(item):
            return (yield)

    pytest_runtest_teardown = pytest_runtest_call

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if (case := _kit_of(item)) is not None:
            ran = self._ran.setdefault(case, Ran())
            ran.seconds += report.duration
            ran.passed += report.passed and report.when == "call"
            if report.failed:
                ran.failed[item.name.partition("[")[0]] += 1
            elif report.skipped and isinstance(report.longrepr, tuple):
                ran.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        kits = []
        for case, ran in self._ran.items():
            budgets = {what: each for (of, what), each in _BUDGETS.items() if of is case}
            terminalreporter.section(f"kit of {case.__name__}")
            counts = f"{ran.passed} passed, {ran.failed.total()} failed, {ran.skipped.total()} skipped"
            terminalreporter.line(f"{counts}, in {ran.seconds:.0f} s at load {os.getloadavg()[0]:.0f}")
            terminalreporter.line(f"usually {case.usual_s:g} s, on two cores at load 20 to 40")
            for reason, count in ran.skipped.most_common():
                terminalreporter.line(f"skipped {count}: {reason}")
            for what, (took, limit) in budgets.items():
                terminalreporter.line(f"{what}: {1e3 * took:.2f} ms of {1e3 * limit:.2f} ms")
            kits.append({"kit": case.__name__, "plugin": getattr(case, "use", ""), **vars(ran), "budgets_s": budgets})
        if path := os.environ.get("KVF_KIT_REPORT"):
            Path(path).write_text(json.dumps({"kvframework": __version__, "kits": kits}, indent=1))

    @contextlib.contextmanager
    def _limited(self, item: pytest.Item) -> Iterator[None]:
        case = _kit_of(item)
        limit_s = (case or Kit).limit_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        others_s = signal.getitimer(signal.ITIMER_REAL)[0]  # pytest-timeout, for example
        if case is None or 0 < others_s <= limit_s or threading.current_thread() is not threading.main_thread():
            return (yield)
        began = time.monotonic()

        def end(_signal: int, _frame: FrameType | None) -> None:
            __tracebackhide__ = True
            self._ended.setdefault(case, item.name)
            others = [each for each in threading.enumerate() if each is not threading.current_thread()]
            told = f"{item.nodeid} still runs after {limit_s:.3g} s (`limit_s`, and the load). Other threads:"
            told += stacks(others) or " none"
            signal.setitimer(signal.ITIMER_REAL, limit_s)  # what it ends may wait once more on its way out
            raise DoesNotEnd(told)

        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        faulthandler.dump_traceback_later(2 * limit_s + 3, exit=True, file=self._stderr)
        try:
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # whatever the signal has ended before
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGALRM, before)
            if others_s:
                signal.setitimer(signal.ITIMER_REAL, max(others_s - (time.monotonic() - began), 0.001))

    def pytest_unconfigure(self) -> None:
        """End the process some time later where threads of a plugin keep it from ending."""
        if any(not each.daemon and each is not threading.main_thread() for each in threading.enumerate()):
            faulthandler.dump_traceback_later(_END_S, exit=True, file=self._stderr)


def _kit_of(item: pytest.Item) -> type[Kit] | None:
    case = getattr(item, "cls", None)
    return case if case is not None and issubclass(case, Kit) else None


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
        pytest.fail(f"A call did not return within {within_s:g} s:\n{stacks(running)}", pytrace=False)


def shown(error: Exception) -> str:
    binary = any(isinstance(each, bytes | bytearray | memoryview) for each in error.args)
    return f"{type(error).__name__}: {'of bytes' if binary else str(error)[:_LONGEST]}"


def held(*, mappings: bool = False) -> set[str]:
    found = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add(f"descriptor {number} ({os.readlink(f'/proc/self/fd/{number}')})")
    if mappings:
        with open("/proc/self/maps") as file:
            found |= {f"mapping {line.split()[0]}" for line in file if line.split(None, 2)[1].endswith("s")}
    return found


def wait_until(condition: Callable[[], object], what: str, timeout: float = 20.0) -> None:
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            pytest.fail(f"Waited {timeout:g} s in vain for {what}")
        time.sleep(0.005)


def load() -> float:
    """Return how many times longer than on an idle machine work takes now, at least 1. Takes 20 ms of work."""
    began, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < _PROBE_S:
        pass
    return max(1.0, (time.perf_counter() - began) / _PROBE_S)


def must_be_equal(found: Buffer, wanted: Buffer, why: str) -> None:
    """Fail unless these bytes are equal; shows the first difference, since they may be many."""
    __tracebackhide__ = True
    if found != wanted:
        one, other = memoryview(found), memoryview(wanted)
        at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        there, right = bytes(one[at : at + 20]), bytes(other[at : at + 20])
        pytest.fail(f"{why}: from byte {at} of {len(other)} it is {there!r}, expected {right!r}")


def must_refuse(
    what: str, call: Callable[[], T], error: type[Exception], *, unless: Callable[[T], bool] = lambda _: False
) -> None:
    __tracebackhide__ = True
    try:
        answer = call()
    except error:
        return
    except Exception as other:  # noqa: BLE001  any other is the bug
        pytest.fail(f"{what} raised {type(other).__name__}, expected {error.__name__}: {str(other)[:_LONGEST]}")
    if not unless(answer):
        pytest.fail(f"{what} was accepted; it must raise {error.__name__}")


class Kit:
    """Base class of the kits' test classes. pytest's own collection of them installs the hooks that they need."""

    limit_s: ClassVar[float] = 60.0
    """Seconds after which a test, or its setup or teardown, is ended and fails with the stacks of all threads; on a
    busy machine, times its load average per core. The rest of its class is then skipped."""

    stop_after: ClassVar[int] = 4
    """After so many tests have failed the rest of the class is skipped: they would fail for the same reason."""

    usual_s: ClassVar[float] = 50.0
    """Seconds that the kit of this kind took on two busy cores (load average 20 to 40), for the summary."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        plugins = metafunc.config.pluginmanager
        if not plugins.has_plugin(__name__):
            plugins.register(Hooks(metafunc.config), __name__)

    def must_take(self, what: str, seconds: float, budget_s: float) -> None:
        """Fail if the seconds are more than the budget, scaled by how busy the machine is now."""
        limit = budget_s * load()
        _BUDGETS[type(self), what] = seconds, limit
        assert seconds <= limit, f"{what} took {1e3 * seconds:.1f} ms; the budget is {1e3 * limit:.1f} ms"

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


class NamedKit(Kit):
    """Base class of the kits that an author configures by `use` and `options`, or by a fixture of a factory."""

    use: ClassVar[str] = ""
    """Name of the plugin; its entry point is `<kind>.<use>`."""

    options: ClassVar[Mapping[str, object]] = {}
    """Options of the plugin, as in its TOML table."""

    _descriptor: ClassVar[type[Provider[Any]]]

    _where: ClassVar[str] = "`options` of the kit"

    def resolve(self, options: Mapping[str, object] | None = None) -> tuple[Any, Any]:
        """Return the provider that `use` names, and its options as a server gets them. Skips if it cannot run here."""
        if not self.use:
            pytest.fail(f"Set `use`, the plugin's name, or define a fixture `{self._fixture}` in the test class")
        table = PluginTable(self.use, dict(self.options if options is None else options), self._where)
        try:
            return resolve_table(PluginRegistry(), table, self._descriptor)
        except PluginUnavailable as error:
            pytest.skip(error.fact)

    def by_name(self, options: Mapping[str, object] | None = None) -> Callable[[], Any]:
        provider, checked = self.resolve(options)
        return partial(provider.create, checked)

    @property
    def _fixture(self) -> str:
        kind = self._descriptor.kind
        return {"eviction": "make_policy", "tier": "tier"}.get(kind, f"make_{kind}")

    def must_be_named(self, name: object) -> None:
        kind = self._descriptor.kind
        assert isinstance(name, str), f"The {kind}'s `name` must be a str, but is {name!r}"
        assert name, f"The {kind}'s `name` is empty: give the plugin's name"
        assert not self.use or name == self.use, f"The {kind}'s `name` is {name!r}, but its plugin is {self.use!r}"

    def elsewhere(self, made: object, program: str, *, seed: int = 1, without: str = "") -> bytes:
        """Run `program` in a process with `seed` as `PYTHONHASHSEED`, where `made` is the same plugin, and return its
        standard output. `without` names a module that cannot be imported there; the plugin is then made without
        options. Without `use`, that process imports the plugin's class, and its attributes are written into the
        program; the test is skipped where that is impossible. Blocks up to 60 s.
        """
        lacking = f"sys.modules[{without!r}] = None\n" if without else ""
        if self.use:
            options = {} if without else dict(self.options)
            source = _BY_NAME.format(kind=self._descriptor.kind, use=self.use, options=options)
        else:
            source = _by_state(made)
        run = subprocess.run(
            [sys.executable, "-"],
            input=f"import sys; sys.path[:] = {sys.path!r}\n{lacking}{source}{program}".encode(),
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            timeout=60,
            check=False,
        )
        last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        assert run.returncode == 0, f"The plugin failed in a second process: {last or run.returncode}"
        return run.stdout


def _by_state(made: object) -> str:
    """Return source that makes a copy of `made` in another process. Skips the test where that is impossible."""
    kind = type(made)
    try:
        found = operator.attrgetter(kind.__qualname__)(importlib.import_module(kind.__module__))
        object.__new__(kind)
        goes = found is kind and ast.literal_eval(repr(vars(made))) == vars(made)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError):
        goes = False
    if not goes or any(getattr(each, "__slots__", ()) for each in kind.__mro__):
        why = f"{kind.__qualname__} cannot be imported there, or its attributes are not literals"
        pytest.skip(f"Set `use`, so that a second process can make the plugin: {why}")
    return _BY_STATE.format(module=kind.__module__, qualname=kind.__qualname__, state=vars(made))
