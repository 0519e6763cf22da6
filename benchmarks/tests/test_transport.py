"""`bench transport` as a process: any installed transport, with an author's memory, and what cannot be measured."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.tests.test_commands import COMMAND, ENVIRON, SPREAD

RIG = """
from kvf_dev.testing.transport.rig import TorchRig

class Rig(TorchRig):
    def __init__(self, directory):
        super().__init__("cpu_gather", directory)


class Wrong(Rig):
    def read(self, tensor):
        found = bytearray(super().read(tensor))
        found[-1] ^= 1
        return bytes(found)

def other(directory):
    return TorchRig("wire", directory)
"""


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "rigs.py").write_text(RIG)
    environ = {**ENVIRON, "PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))}
    command = [*COMMAND, "transport", *arguments, "--quick"]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=240, check=False)


@pytest.mark.torch
@pytest.mark.parametrize("rig", [(), ("--rig", "rigs:Rig")], ids=["host memory", "an author's"])
def test_an_installed_transport_is_measured_next_to_a_plain_copy(tmp_path: Path, rig: tuple[str, ...]) -> None:
    pytest.importorskip("torch")
    done = bench(tmp_path, "cpu_gather", *rig, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["bench"], document["figures"]["path"]) == ("transport", "cpu_gather")
    (shape,) = document["figures"]["shapes"]
    assert shape["verified"] is True
    assert shape["nbytes"] == shape["copy"]["nbytes"] == 4 << 20
    for each in (shape["store"], shape["retrieve"]):
        assert set(each["gb_s"]) == set(each["ratio_to_copy"]) == SPREAD


@pytest.mark.torch
def test_wrong_bytes_make_no_figures(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = bench(tmp_path, "cpu_gather", "--rig", "rigs:Wrong")
    assert done.returncode != 0
    assert "bench.wrong_bytes" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], "no installed distribution offers the transport 'nosuch'"),
        (["cpu_gather", "--rig", "nowhere:Rig"], "the rig 'nowhere:Rig' cannot be made: No module named 'nowhere'"),
        (["cpu_gather", "--rig", "rigs:other"], "is for the transport 'wire', not for 'cpu_gather'"),
        (["cpu_gather", "--rig", "rigs:Rig", "--rig-argument", "directory"], "NAME=VALUE"),
        (["cpu_gather", "--size", "9999"], "2048"),
    ],
)
def test_what_cannot_be_measured_is_told(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = bench(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert says in " ".join(done.stderr.replace("│", " ").split())
