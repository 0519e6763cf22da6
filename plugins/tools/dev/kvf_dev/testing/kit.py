"""The base of every conformance kit: no test hangs, a failure names the promise, one mistake in a name is one error."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvf_dev.testing.once import Once
from kvf_dev.testing.overdue import Overdue
from kvf_dev.testing.promise import Promise


class Kit:
    """Base class of the kits' test classes. pytest's own collection of them installs the hooks that they need."""

    limit_s: ClassVar[float] = 60.0
    """Seconds after which a test, or its setup or teardown, is ended and fails with the stacks of all threads. The rest
    of its class is then skipped."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        plugins = metafunc.config.pluginmanager
        for kind in (Once, Promise, Overdue):
            if not plugins.has_plugin(kind.__module__):
                plugins.register(kind(Kit, metafunc.config), kind.__module__)
