"""The problems that an inspection reports: the severity of each id, and the usual way to correct it; and what its
processes tell each other."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from importlib import metadata
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec import Struct

from kvframework.api.codec import MAX_CODEC_NAME
from kvframework.api.plugin import ENTRY_POINT_GROUP
from kvframework.registry.discovery import EntryPointInfo

Severity = Literal["error", "warning"]
FORKED = " returned in a process that it has forked, which ends"


class Cost(Struct, frozen=True):
    """The cost of an import. `roots` are the imported top-level packages, beside the standard library's."""

    seconds: float
    nbytes: int
    roots: list[str]


class Line(Struct, omit_defaults=True):
    """One line of the report: the next step, a problem, the import's cost, or a note on a part that could not be
    inspected. `dies` is the id of the problem if the process ends during the step, and `where` its place."""

    step: str = ""
    dies: str = ""
    where: str = ""
    problem: Problem | None = None
    cost: Cost | None = None
    note: str = ""
    provider: str = ""


class Target(Struct, frozen=True):
    """One inspection. `module` is imported, `attribute` of it holds the hooks ("" for the module itself). `offers` are
    its entry points; `rivals` those of other distributions for the same names. `chosen` limits the inspection to one
    provider, and `options` are passed to its `create`."""

    module: str
    attribute: str
    offers: list[EntryPointInfo]
    rivals: list[EntryPointInfo]
    chosen: str = ""
    options: dict[str, Any] = {}

    @property
    def value(self) -> str:
        return f"{self.module}:{self.attribute}" if self.attribute else self.module


class Kind(NamedTuple):
    severity: Severity
    hint: str


_IMPORT_LATER = "import the library inside `create`, or in a module that only `create` imports"
_MARK = "mark the function that returns the providers with @kvframework.api.plugin.hookimpl"
_LIST = "return a list of provider descriptors of the hook's kind"
_PROJECT = "add the entry to [project] of pyproject.toml"
_CONTRACT = "implement the method as its base class describes"
PROBLEMS = {
    "import-fails": Kind("error", _IMPORT_LATER),
    "import-dies": Kind("error", _IMPORT_LATER),
    "heavy-import": Kind("error", _IMPORT_LATER),
    "eager-import": Kind("warning", _IMPORT_LATER),
    "internal-import": Kind("warning", "use only public modules: other modules change without notice"),
    "misspelt-hook": Kind("error", "rename the hook"),
    "unmarked-hook": Kind("error", _MARK),
    "async-hook": Kind("error", "hooks run once, at startup, in a process without an event loop"),
    "hook-arguments": Kind("error", "hooks are called without arguments; options are passed to `create`"),
    "no-hook": Kind("error", _MARK),
    "hook-fails": Kind("error", _LIST),
    "wrong-kind": Kind("error", _LIST),
    "api-version": Kind("error", "ask for a lower API version, or check with a newer kvframework"),
    "name-conflict": Kind("error", "choose another name, or uninstall the other plugin"),
    "entry-point-name": Kind("error", "rename the entry point or the provider"),
    "plugin-name": Kind("error", "choose another name"),
    "no-entry-point": Kind("error", f'add the plugin to [project.entry-points."{ENTRY_POINT_GROUP}"]'),
    "not-installed": Kind("warning", "install the plugin: pip install -e ."),
    "no-requires-python": Kind("warning", _PROJECT),
    "no-dependency": Kind("warning", _PROJECT),
    "no-summary": Kind("warning", "write a summary, which `kvframework plugins info` shows"),
    "probe-fails": Kind("error", "test for a library with importlib.util.find_spec, without an import"),
    "undocumented-option": Kind("error", "write a description, which `kvframework plugins info` shows"),
    "wrong-default": Kind(
        "error", "declare a text, number, boolean, array, table or None; build other objects in `create`"
    ),
    "unreadable-option": Kind("error", "declare a string, and build the object in `create`"),
    "reserved-option": Kind("error", "rename the option"),
    "create-fails": Kind("error", "raise a KVFrameworkError, or let the probe report the missing requirement"),
    "options-refused": Kind("error", "give other values"),
    "create-dies": Kind("error", "a plugin raises errors, and gives every wait a deadline"),
    "missing-method": Kind("error", _CONTRACT),
    "missing-attribute": Kind("error", "set the attribute in the class or in __init__"),
    "wrong-signature": Kind("error", "use the contract's parameter names; give additional parameters defaults"),
    "async-method": Kind("error", "write def instead of async def; a handler returns a Future for slow work"),
}


class Problem(Struct, frozen=True):
    """One thing that an author should correct. `where` is the module, class, field or metadata it is in, `expected` the
    correct form."""

    id: str
    severity: Severity
    where: str
    fact: str
    expected: str = ""
    hint: str = ""


def problem(name: str, where: str, fact: str, expected: str = "", hint: str = "") -> Problem:
    """Return a problem, with the usual hint of its id if none is given. Raises `KeyError` for an unknown id."""
    known = PROBLEMS[name]
    return Problem(name, known.severity, where, fact, expected, hint or known.hint)


MAX_NAME = 32
_WORDS = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# The bounds of the kinds that have one of their own: each value in L2 carries the name of its codec.
_LONGEST = {"codec": MAX_CODEC_NAME}
# Words that mean something else wherever the name of such a plugin is written.
_RESERVED = {
    ("codec", "allow"): "`allow` is a key of [codecs], beside the tables [codecs.NAME]",
    ("transport", "auto"): "`auto` lets an engine choose among the server's transports",
}


class NameFault(NamedTuple):
    """Why a plugin cannot have a name, which names there may be, and the nearest of them, "" for none."""

    fact: str
    available: str
    nearest: str


def name_fault(kind: str, name: str) -> NameFault | None:
    """Return why a plugin of a kind cannot have a name, or None. `kind` need not exist."""
    longest = _LONGEST.get(kind, MAX_NAME)
    available = f"lower-case letters, digits and single underscores between them, at most {longest}"
    if reason := _RESERVED.get((kind, name)):
        return NameFault(f"{name!r} cannot be the name of a {kind}: {reason}", available, f"{name}_{kind}")
    if _WORDS.fullmatch(name) and len(name) <= longest:
        return None
    fact = f"{name!r} cannot be the name of a {kind}"
    if len(name) > longest:
        fact += f": it has {len(name)} characters"
    return NameFault(fact, available, _nearest(name, longest))


def _nearest(name: str, longest: int) -> str:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip()).lower().removeprefix("kvf-").removeprefix("kvf_")
    tried = re.sub(r"[^a-z0-9]+", "_", spaced).strip("_")[:longest].rstrip("_")
    return tried if _WORDS.fullmatch(tried) else ""


T = TypeVar("T")
# In processor time, so that a busy machine is no reason to refuse a plugin.
MOST_S = 0.05
MOST_BYTES = 32 << 20
# Packages of an accelerator or an engine: their import takes memory of the device, threads, or seconds.
_HEAVY = {"cuda", "cupy", "flash_attn", "jax", "numba", "pycuda", "pynvml", "tensorflow", "torch", "torch_npu"}
_HEAVY |= {"transformers", "triton", "vllm"}


def measured(work: Callable[[], T]) -> tuple[T, Cost]:
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
    return {root for root in roots - {"kvframework", "kvf_devices", "kvf_helper_tier"} if not root.startswith("__")}


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
