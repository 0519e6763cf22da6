"""The cost of importing a module: the distributions imported with it, its time, its memory.

`main` runs in a fresh interpreter, `cost_of` in the process of the command.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator
from importlib import metadata

import msgspec

from kvf_dev.inspection.problems import Problem, problem
from kvframework.supervise.child import Ran, run_isolated

# In processor time, so that a busy machine is no reason to refuse a plugin.
MOST_S = 0.05
MOST_BYTES = 32 << 20
_ATTEMPTS = 3
# Packages of an accelerator or an engine: their import takes memory of the device, threads, or seconds.
_HEAVY = {"cuda", "cupy", "flash_attn", "jax", "numba", "pycuda", "pynvml", "tensorflow", "torch", "torch_npu"}
_HEAVY |= {"transformers", "triton", "vllm"}


class Cost(msgspec.Struct, frozen=True):
    """The measured cost. `roots` are the imported top-level packages, beside the standard library's."""

    seconds: float
    nbytes: int
    roots: list[str]


def cost_problems(module: str, distributions: Collection[str], *, deadline_s: float) -> tuple[list[Problem], bool]:
    """The import's excess costs, and whether the module can be imported at all. Packages of `distributions` may be
    imported with it."""
    costs: list[Cost] = []
    while len(costs) < _ATTEMPTS and not (costs and costs[-1].seconds <= MOST_S):
        ran = run_isolated("kvf_dev.inspection.cost", b"", deadline_s=deadline_s, arguments=(module,))
        if ran.ended:
            fact = f"the interpreter that imports it {ran.ended}: {last_line(ran)}".removesuffix(": ")
            return [problem("import-dies", module, fact, "an import that ends")], False
        cost = msgspec.json.decode(ran.lines[0], type=Cost | str)
        if isinstance(cost, str):
            return [problem("import-fails", module, f"the import fails with {cost}")], False
        costs.append(cost)
    best = min(costs, key=lambda cost: cost.seconds)
    owners = metadata.packages_distributions()
    own = {root for root, names in owners.items() if not set(distributions).isdisjoint(names)}
    return list(
        _too_much(module, best, [root for root in best.roots if root not in own | {module.partition(".")[0]}])
    ), True


def last_line(ran: Ran) -> str:
    """Return the last line that a process has printed, "" if it was silent."""
    return ran.printed.strip().rpartition("\n")[2]


def _too_much(module: str, cost: Cost, others: list[str]) -> Iterator[Problem]:
    heavy = [root for root in others if root in _HEAVY]
    if heavy or cost.seconds > MOST_S or cost.nbytes > MOST_BYTES:
        taken = f"{cost.seconds * 1000:.0f} ms of processor time and {cost.nbytes / 1e6:.0f} MB"
        limit = f"at most {MOST_S * 1000:.0f} ms and {MOST_BYTES >> 20} MiB, and no library of an accelerator"
        yield problem("heavy-import", module, f"the import takes {taken}, with {', '.join(others) or 'nothing'}", limit)
    for root in others:
        if root not in heavy:
            yield problem("eager-import", module, f"the import brings in {root}")


def main() -> None:
    """Import `argv[2]` and report a `Cost`, or the text of its exception."""
    with os.fdopen(int(sys.argv[1]), "wb", closefd=False) as report:
        report.write(msgspec.json.encode(_measured(sys.argv[2])) + b"\n")


def _measured(module: str) -> Cost | str:
    import kvframework.api.hookspecs
    import kvframework.errors  # noqa: F401  what every plugin pays for

    before, resident = _roots(), _resident()
    started = time.process_time()
    try:
        __import__(module)
    except Exception as error:  # noqa: BLE001  whatever a plugin raises
        return " ".join(f"{type(error).__name__}: {error}".split())
    seconds = time.process_time() - started
    return Cost(seconds, max(_resident() - resident, 0), sorted(_roots() - before))


def _roots() -> set[str]:
    """Imported packages of installed distributions: the standard library's and kvframework's own are free, and what
    stands above every device's driver."""
    roots = {name.partition(".")[0] for name in sys.modules}
    return {
        root
        for root in roots - sys.stdlib_module_names
        if root not in ("kvframework", "kvf_devices") and not root.startswith("__")
    }


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
