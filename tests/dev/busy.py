"""Runs each conformance kit on a correct plugin again and again beside two busy loops: none may fail for that.

    python -m tests.dev.busy [RUNS [KIND...]]

Prints a line for each run, and the output of one that failed; exits with 1 if there was any.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
# Ends with the process that started it, however that ends.
_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
# By kind, the classes of kits on correct plugins.
KITS = {
    "codec": ["tests/core/defaults/test_codecs.py::TestZstd"],
    "eviction": ["tests/core/defaults/test_eviction.py::TestLru"],
    "hasher": ["tests/dev/kits/test_hasher_kit.py::TestRightHasher"],
    "layout": [f"tests/dev/kits/test_layout_conformance.py::Test{each}" for each in ("Paged", "Hybrid", "Opaque")],
    "listener": ["tests/events/test_conformance.py::TestEvents"],
    "memory": ["tests/core/defaults/test_pinned.py::TestArena"],
    "tier": ["tests/filesystem/test_tier.py::TestSharedFolder"],
    "transport": ["tests/core/defaults/test_cpu_gather_conformance.py::TestCpuGather"],
    "transport-device": ["tests/devices/test_conformance_simdev.py::TestSimdev"],
}


@contextmanager
def busy(loops: int = 2) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def run(kind: str, tests: Sequence[str], folder: Path) -> bool:
    """Run one kit once, and tell its outcome; returns whether all of its tests passed or were skipped."""
    report = folder / "report.json"
    options = [
        "-q",
        "-c",
        str(CHECKOUT / "pyproject.toml"),
        "--rootdir",
        ".",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=0",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        env={**os.environ, "KVF_KIT_REPORT": str(report)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    kits = json.loads(report.read_text())["kits"] if report.exists() else []
    report.unlink(missing_ok=True)
    passed, seconds = sum(each["passed"] for each in kits), sum(each["seconds"] for each in kits)
    failed = [test for each in kits for test in each["failed"]]
    is_right = done.returncode == 0 and passed > 0
    told = "" if is_right else f", exit code {done.returncode}, failed: {', '.join(failed)}\n{done.stdout}"
    print(f"{kind}: {passed} passed in {seconds:.0f} s{told}", flush=True)
    return is_right


def main(arguments: Sequence[str]) -> int:
    runs, kinds = int(arguments[0]) if arguments else 20, arguments[1:] or list(KITS)
    with busy(), tempfile.TemporaryDirectory() as folder:
        right = [run(kind, KITS[kind], Path(folder)) for _ in range(runs) for kind in kinds]
    print(f"{right.count(True)} of {len(right)} runs accused nobody")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
