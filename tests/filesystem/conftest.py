"""What tests of the filesystem tier have opened is closed when they end, before the folders go that it is in."""

from __future__ import annotations

from tests.filesystem.folder import opened


def pytest_runtest_teardown() -> None:
    while opened:
        opened.pop().close()
