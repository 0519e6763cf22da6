"""The processor time of a connector: what the kernel counts of a process that says which part is its connector's."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework_bench.serving.connector_time import FOLDER, connector_time
from kvframework_bench.serving.engines import TIMED, transfer

STAND_IN = Path(__file__).with_name("stand_in_connector.py")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(STAND_IN)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, FOLDER: str(tmp_path)},
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def alive(tasks: Path) -> set[int]:
    return {int(each.name) for each in tasks.iterdir()}


def test_calls_and_threads_of_the_connector_count_and_none_of_the_engine(
    engine: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Processor time, so a busy machine changes nothing: 0.7 s are the connector's, 0.9 s the engine's."""
    times = connector_time([os.getpid(), engine.pid], tmp_path)
    assert times is not None
    assert 0.7 <= times.processor_s < 0.95
    noted = array("Q", (tmp_path / str(engine.pid)).read_bytes())
    tasks = Path(f"/proc/{engine.pid}/task")
    own = [(tasks / str(thread) / "comm").read_text() for thread in noted[4 : 4 + noted[3]] if thread in alive(tasks)]
    assert len(own) == len(set(noted[4 : 4 + noted[3]])) - 1  # one has ended
    of_zmq = sorted(name for name in own if name.startswith("ZMQ"))
    assert of_zmq == ["ZMQbg/IO/0\n", "ZMQbg/Reaper\n"]


def test_of_processes_without_a_connector_nothing_is_known(tmp_path: Path) -> None:
    assert connector_time([os.getpid()], tmp_path) is None


def test_what_a_process_has_told_outlives_it(engine: subprocess.Popen[str], tmp_path: Path) -> None:
    engine.communicate()
    times = connector_time([engine.pid], tmp_path)
    assert times is not None
    assert 0.2 <= times.processor_s < 0.35


def test_an_engine_gets_the_connector_by_its_name_from_the_counting_module() -> None:
    option, text = transfer("Some", {"a": 1})
    assert option == "--kv-transfer-config"
    assert '"kv_connector": "Some"' in text
    assert f'"kv_connector_module_path": "{TIMED}"' in text
