"""The bare peer, in its own process."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvframework_bench.errors import BenchFailed
from kvframework_bench.process import running, scratch
from kvframework_bench.zmq_reference import running_zmq_peer


def test_a_peer_echoes_takes_and_gives() -> None:
    with scratch() as directory, running_zmq_peer(directory) as peer:
        assert peer.echo(b"") > 0
        assert peer.echo(bytes(200_000)) > 0
        assert peer.put(1_000_001, 300_000) > 0
        assert peer.get(900_000, 300_000) > 0
        assert peer.echo(b"in step") > 0  # nothing is left in the socket
        with pytest.raises(ValueError):
            peer.get(1_000_001, 300_000)
    assert not directory.exists()


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    with running("engine", ["/bin/sh", "-c", "echo no luck; exit 3"], tmp_path) as child:
        child._process.wait(60)
        with pytest.raises(BenchFailed, match="engine ended with status 3") as failed:
            child.check_alive()
    assert "no luck" in str(failed.value)


def test_a_signal_during_a_start_stops_the_child_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), running("sleeper", ["sleep", "60"], tmp_path):
        pytest.fail("the bench went on")
    assert started[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
