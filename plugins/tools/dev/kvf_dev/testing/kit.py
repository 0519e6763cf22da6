"""The base of every conformance kit: no test hangs, a failure begins with the promise that the plugin broke, which is
the name of the test, and one mistake in a name is one error of the class."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from types import TracebackType
from typing import ClassVar

import pytest

from kvf_dev.testing.overdue import Overdue


class Once:
    """Hooks of pytest: where the setup of a test fails at the place where another test's of its class did, the test is
    skipped, and names the other one."""

    def __init__(self, kit: type, _config: pytest.Config) -> None:
        self._kit = kit
        # The first test by class, type of the error, and the line that raised it.
        self._first: dict[tuple[object, ...], str] = {}

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        case = getattr(item, "cls", None)
        if case is None or not issubclass(case, self._kit):
            return (yield)
        __tracebackhide__ = True
        try:
            return (yield)
        except pytest.skip.Exception:
            raise
        except (Exception, pytest.fail.Exception) as error:
            *_, place = traceback.extract_tb(error.__traceback__)
            first = self._first.setdefault((case, type(error), place.filename, place.lineno), item.name)
            if first == item.name:
                raise
        pytest.skip(f"its setup fails as that of {first} does, which shows the error")


_LONGEST = 300


class Promise:
    """Hooks of pytest that put the promise before the text of an assertion, and an assertion around any other error.

    An assertion of a kit is shown by its text alone, without the values that pytest adds: they may be large."""

    def __init__(self, kit: type, _config: pytest.Config) -> None:
        self._kit = kit

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        __tracebackhide__ = True
        case = getattr(item, "cls", None)
        if case is None or not issubclass(case, self._kit):
            return (yield)
        promise = item.name.partition("[")[0].removeprefix("test_").replace("_", " ")
        try:
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

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        """Return what differs, where the left side of a comparison knows how to say it (`Answers`)."""
        differs = getattr(left, "differs_from", None)
        return [differs(right)] if op == "==" and differs is not None else None


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


class Kit:
    """Base class of the kits' test classes. pytest's own collection of them installs the hooks that they need."""

    limit_s: ClassVar[float] = 60.0
    """Seconds after which a test, or its setup or teardown, is ended and fails with the stacks of all threads. The rest
    of its class is then skipped."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        plugins = metafunc.config.pluginmanager
        for kind in (Once, Promise, Overdue):
            name = f"{kind.__module__}.{kind.__name__}"
            if not plugins.has_plugin(name):
                plugins.register(kind(Kit, metafunc.config), name)
