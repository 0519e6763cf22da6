"""The report of a wrong plugin name, option or fixture: one error of the class, not one of each of its tests."""

from __future__ import annotations

import traceback
from collections.abc import Generator

import pytest


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
