"""L1 of a server whose capacity nobody names: a share of the available memory, and the same at the next start."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvframework.cli.serving import LEAST_L1, ServeOptions, with_capacity
from kvframework.errors import ArenaError
from tests.support.held_server import HeldServer
from tests.support.server_process import ServerProcess

MIB = 1 << 20
PROGRAM = """
import kvframework.api.memory as memory
memory.available_memory = lambda: int(open({file!r}).read()) << 20
from kvframework.cli.main import main
main()
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    file = tmp_path / "available"
    file.write_text("513")
    return file


def program(machine: Path) -> tuple[str, str]:
    return "-c", PROGRAM.format(file=str(machine))


def capacity(server: ServerProcess) -> int:
    return int(server.status()["l1"]["capacity_bytes"])


def test_l1_is_a_quarter_of_the_available_memory_and_a_line_says_so(machine: Path) -> None:
    with ServerProcess(capacity="", program=program(machine)) as server:
        assert capacity(server) == 128 * MIB
        assert "L1 has 128.0 MiB: 25% of the 513.0 MiB of available memory" in server.log


def test_a_takeover_keeps_it(machine: Path) -> None:
    with ServerProcess(capacity="", program=program(machine)) as server:
        machine.write_text("300")
        assert server.take_over() == 0
        assert capacity(server) == 128 * MIB
        assert "L1 has 128.0 MiB: the size of the kept L1" in server.log


def test_a_server_that_is_killed_goes_on_with_what_its_keeper_has(machine: Path) -> None:
    with HeldServer(capacity="", program=program(machine)) as server:
        machine.write_text("2000")
        server.kill9()
        server.start()
        assert capacity(server) == 128 * MIB
        assert server.recovered()["why_cold"] == ""


@pytest.mark.parametrize("named", ["l1.capacity=1MiB", "l1.use=other", " l1.capacity = 1MiB"])
def test_what_is_named_stays(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFRAMEWORK_CONFIG", raising=False)
    options = ServeOptions(None, (named,), {}, False)
    assert with_capacity(options, None) is options
    in_file = ServeOptions(Path("kvf.toml"), (), {}, False)
    assert with_capacity(in_file, None) is in_file
    monkeypatch.setenv("KVFRAMEWORK_CONFIG", "kvf.toml")
    by_variable = ServeOptions(None, (), {}, False)
    assert with_capacity(by_variable, None) is by_variable


def test_too_little_memory_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFRAMEWORK_CONFIG", raising=False)
    monkeypatch.setattr("kvframework.api.memory.available_memory", lambda: 4 * LEAST_L1 - 1)
    with pytest.raises(ArenaError, match=r"L1 would get 62\.0 MiB") as refused:
        with_capacity(ServeOptions(None, (), {}, False), None)
    assert "64.0 MiB or more" in refused.value.available


def test_a_configuration_from_a_pipe_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "kvf.toml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('[l1]\nuse = "pinned"\ncapacity = "1MiB"\n',))
    writer.start()
    monkeypatch.setenv("KVFRAMEWORK_CONFIG", str(pipe))
    with ServerProcess(capacity="") as server:
        writer.join()
        assert capacity(server) == MIB
