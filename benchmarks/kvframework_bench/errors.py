"""The errors of benchmarks, and the record of a part that cannot be measured on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvframework.api.installing import install_command
from kvframework.errors import KVFrameworkError


class BenchFailed(KVFrameworkError, RuntimeError, code="bench.failed"):
    """A benchmark could not run to its end, or something that it needs failed.

    What to do: the text says which process or check failed."""


class BenchUnavailable(KVFrameworkError, code="bench.unavailable"):
    """Something that a part measures is missing: a package is not installed, or the transport has no such path.

    What to do: install what it names, or leave that part out."""


class WrongBytes(BenchFailed, code="bench.wrong_bytes"):
    """What came back is not what was stored, so its speed means nothing.

    What to do: do not use this build; report it with the machine and the command."""


class Incomparable(KVFrameworkError, ValueError, code="bench.incomparable"):
    """Two files cannot be compared: one is no document of a bench, or they measured different things.

    What to do: measure both with the same command and the same release of kvframework-bench, `--json`."""


T = TypeVar("T")


class Skipped(msgspec.Struct, frozen=True):
    what: str
    reason: str
    hint: str


def measure_or_skip(skipped: list[Skipped], what: str, make: Callable[[], T]) -> T | None:
    """Return the result of `make`; None, and a line more in `skipped`, if it raises `BenchUnavailable`."""
    try:
        return make()
    except BenchUnavailable as error:
        skipped.append(Skipped(what, error.fact, error.hint))
        return None


def require_torch() -> None:
    """Raise `BenchUnavailable` without torch, for an engine's tensors. Imports nothing."""
    _require(install_command("torch"), "torch", "numpy")


def require_transformers() -> None:
    """Raise `BenchUnavailable` without transformers, for a model. Imports nothing."""
    _require(install_command(distribution="kvframework-transformers"), "torch", "numpy", "transformers")


def require_vllm() -> None:
    """Raise `BenchUnavailable` without vLLM. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise BenchUnavailable("vLLM is not installed", hint="benchmarks/kvframework_bench/vllm/install.sh ENV")


def _require(hint: str, *modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchUnavailable(f"not installed: {', '.join(missing)}", hint=hint)
