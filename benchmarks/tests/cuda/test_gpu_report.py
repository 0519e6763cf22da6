"""The report of a GPU, on the simulated driver: the doctor finds the GPU, and the bench's figures are in the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.masking import Redaction
from kvframework_bench.gpu_report.contents import collect
from kvframework_bench.gpu_report.steps import steps
from tests.cuda.building import environment
from tests.cuda.node import CudaNode


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaNode]:
    # Too little memory for most shapes: the bench is quick, and names what it leaves out.
    with CudaNode(tmp_path / "node", nbytes=1 << 30, max_delay_s=0.0002) as made:
        for name, value in environment(made.path).items():
            monkeypatch.setenv(name, value)
        yield made


def test_a_gpu_is_found_and_measured(node: CudaNode) -> None:
    wanted = [each for each in steps(None, []) if each.name in ("doctor", "bench")]
    report, files = collect(wanted, Redaction())
    doctor = {each["id"]: each for each in json.loads(files["doctor.json"])["findings"]}
    assert doctor["cuda_ipc.devices"]["level"] == "ok"
    assert report.gpu == ""
    assert report.steps[1].outcome == "ok", files
    bench = json.loads(files["bench.json"])
    assert (bench["bench"], bench["quick"]) == ("cuda", True)
    assert bench["figures"]["gpu"]["name"] == "Simulated GPU"
    assert node.devices[0].removeprefix("GPU-") not in "".join(files.values())
    assert node.violations() == []
