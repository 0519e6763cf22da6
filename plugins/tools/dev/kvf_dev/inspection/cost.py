"""The cost of importing a module: the distributions imported with it, its time, its memory. The inspecting process
measures it, and the process of the command judges it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from importlib import metadata
from typing import TypeVar

from kvf_dev.inspection.problems import Cost, Problem, problem

T = TypeVar("T")
# In processor time, so that a busy machine is no reason to refuse a plugin.
MOST_S = 0.05
MOST_BYTES = 32 << 20
# Packages of an accelerator or an engine: their import takes memory of the device, threads, or seconds.
_HEAVY = {"cuda", "cupy", "flash_attn", "jax", "numba", "pycuda", "pynvml", "tensorflow", "torch", "torch_npu"}
_HEAVY |= {"transformers", "triton", "vllm"}


def measured(work: Callable[[], T]) -> tuple[T, Cost]:
    """Return what `work`, an import, returns, and its cost."""
    before, resident, started = _roots(), _resident(), time.process_time()
    answer = work()
    seconds = time.process_time() - started
    return answer, Cost(seconds, max(_resident() - resident, 0), sorted(_roots() - before))


def cost_problems(module: str, distributions: Collection[str], cost: Cost) -> Iterator[Problem]:
    """Excess costs of the import. Packages of `distributions` may be imported with it."""
    owners = metadata.packages_distributions()
    own = {root for root, names in owners.items() if not set(distributions).isdisjoint(names)}
    others = [root for root in cost.roots if root not in own | {module.partition(".")[0]}]
    heavy = [root for root in others if root in _HEAVY]
    if heavy or cost.seconds > MOST_S or cost.nbytes > MOST_BYTES:
        taken = f"{cost.seconds * 1000:.0f} ms of processor time and {cost.nbytes / 1e6:.0f} MB"
        limit = f"at most {MOST_S * 1000:.0f} ms and {MOST_BYTES >> 20} MiB, and no library of an accelerator"
        yield problem(
            "heavy-import", module, f"importing the plugin takes {taken}, with {', '.join(others) or 'nothing'}", limit
        )
    for root in others:
        if root not in heavy:
            yield problem("eager-import", module, f"importing the plugin imports {root}")


def _roots() -> set[str]:
    """Imported packages, without the standard library's, kvframework's, and what stands above a device's driver."""
    roots = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
    return {root for root in roots if root not in ("kvframework", "kvf_devices") and not root.startswith("__")}


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
