"""What of `KvFrameworkOffloading` only a GPU can prove: one small file, which the page of GPUs names."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OFFLOADING = ROOT / "plugins" / "engines" / "vllm" / "kvf_vllm" / "offloading"
MOST = 300


def test_the_lines_that_only_a_gpu_can_prove_are_few_and_named() -> None:
    with_device = [path for path in OFFLOADING.glob("*.py") if "host_register" in path.read_text()]
    assert [path.name for path in with_device] == ["gpu.py"]
    lines = sum(len(path.read_text().splitlines()) for path in with_device)
    assert lines <= MOST
    assert "`kvf_vllm/offloading/gpu.py`" in (ROOT / "docs" / "deploy" / "gpu.md").read_text()
