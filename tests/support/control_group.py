"""A control group of version 1 that lacks memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_until


def control_group(mebibytes: int) -> Iterator[Path]:
    """For a fixture: a group that allows so much memory; skips where none can be made."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    places = [place for _, controllers, place in lines if "memory" in controllers.split(",")]
    if not places:
        pytest.skip("needs control groups of version 1")
    group = Path(f"/sys/fs/cgroup/memory{places[0]}/kvf-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(mebibytes << 20))
    except OSError as error:
        pytest.skip(f"needs to make a control group: {error}")
    yield group

    def removed() -> bool:
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    wait_until(removed, 60, "an empty group")
