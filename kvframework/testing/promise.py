"""The first words of a failure: the promise that the plugin broke, which is the name of the test."""

from __future__ import annotations

from collections.abc import Generator

import pytest


class Promise:
    """Hooks of pytest that put the promise before the text of an assertion, and an assertion around any other error."""

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
            error.args = (f"{promise}: {error}",)
            raise
        except Exception as error:
            raise AssertionError(f"{promise}: a call raised {type(error).__name__}: {str(error)[:300]}") from error
