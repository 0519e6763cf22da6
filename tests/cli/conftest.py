from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.demo import temporary as temporary


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory of installed distributions for commands, see `tests.cli.command.run`."""
    path = tmp_path / "site"
    path.mkdir()
    return path
