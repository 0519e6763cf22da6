"""The tests of this folder run where Mooncake is installed: in the tox environment `mooncake`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mooncake.real.store import MooncakeStore, missing


@pytest.fixture(scope="session", autouse=True)
def _mooncake() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def shared(_mooncake: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeStore]:
    """A store for the tests of a file that break nothing of it."""
    with MooncakeStore(tmp_path_factory.mktemp("mooncake")) as store:
        yield store


@pytest.fixture
def store(_mooncake: None, tmp_path: Path) -> Iterator[MooncakeStore]:
    """A store that a test may break."""
    with MooncakeStore(tmp_path, peer_bytes=64 << 20) as store:
        yield store
