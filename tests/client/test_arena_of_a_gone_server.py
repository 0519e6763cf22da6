"""A server that is killed between its HELLO and the mapping of its arena is gone, which is no error of the client."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvframework.client import KVClient
from kvframework.errors import ServerGone


def test_a_server_that_ends_before_its_arena_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed() -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    with KVClient(f"ipc://{tmp_path}/s") as client:
        monkeypatch.setattr(client._connection, "liveness_fd", closed)
        arena = os.memfd_create("arena")
        with pytest.raises(ServerGone):
            client._mapped(arena)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(arena)
