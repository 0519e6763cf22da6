"""The steps of a first run on a GPU machine: commands, their bounds, and what each needs to be run here."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import kvframework

DOCTOR = "doctor"
KIT = "tests/cuda/test_conformance.py"
_COMMAND = (sys.executable, "-m", "kvframework.cli.main")
_TRANSPORT = ("transport.0.use=cuda_ipc", "transport.1.use=cpu_gather")


class Step(msgspec.Struct, frozen=True):
    """`command` in `folder` for `limit_s` seconds at most; `missing` says why it cannot be run here, "" if it can.
    `on_gpu`: it is left out where no GPU can be used. `needs_text` is what its output must have to count as passed."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    missing: str = ""
    on_gpu: bool = False
    folder: Path | None = None
    needs_text: str = ""


def steps(config: Path | None, overrides: Sequence[str]) -> list[Step]:
    """Return the steps, in their order; without a configuration the doctor checks the transport all the same."""
    chosen = [] if config is None else ["--config", str(config)]
    settings = overrides or (() if config is not None else _TRANSPORT)
    for setting in settings:
        chosen += ["--set", setting]
    return [
        Step(DOCTOR, (*_COMMAND, "doctor", "--json", *chosen), 120.0),
        _smi("nvidia-smi", f"--query-gpu={_QUERIED}", "--format=csv"),
        _smi("topology", "topo", "-m"),
        _kit(Path(kvframework.__file__).parents[1]),
        _bench("bench", "--quick"),
        _bench("sweep", "--sweep"),
    ]


# No serial numbers.
_QUERIED = (
    "index,name,driver_version,vbios_version,compute_mode,mig.mode.current,persistence_mode,memory.total,memory.used,"
    "pci.bus_id,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,ecc.mode.current,power.draw,clocks.sm"
)


def _smi(name: str, *arguments: str) -> Step:
    found = shutil.which("nvidia-smi")
    return Step(name, (found or "nvidia-smi", *arguments), 30.0, "" if found else "nvidia-smi is not on the PATH")


def _kit(checkout: Path) -> Step:
    command = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rsfE", "-p", "no:cacheprovider", KIT)
    missing = ""
    if not (checkout / KIT).is_file():
        missing = (
            f"{KIT} is missing, because kvframework is not installed from a checkout: run pip install -e in a clone"
        )
    elif importlib.util.find_spec("pytest") is None:
        missing = "pytest is not installed: pip install --group test, in the checkout"
    return Step("kit", command, 1200.0, missing, True, checkout, " passed")


def _bench(name: str, *arguments: str) -> Step:
    return Step(name, (*_COMMAND, "bench", "cuda", "--json", *arguments), 900.0, on_gpu=True)
