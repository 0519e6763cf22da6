"""The errors of benchmarks, and the record of a part that cannot be measured on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvframework.api.installing import install_command
from kvframework.errors import KVFrameworkError


class BenchFailed(KVFrameworkError, RuntimeError, code="bench.failed"):
    """A benchmark, or a process that the benchmark needs, failed.

    What to do: see the process or check that the error names."""


class BenchUnavailable(KVFrameworkError, code="bench.unavailable"):
    """A package or a path of the transport that the benchmark measures is missing.

    What to do: install what the error names, or leave that part of the benchmark out."""


class WrongBytes(BenchFailed, code="bench.wrong_bytes"):
    """A load returned other bytes than were stored.

    What to do: do not use this build; report the machine and the command."""


class Incomparable(KVFrameworkError, ValueError, code="bench.incomparable"):
    """Two files cannot be compared: one is not a result of `kvframework bench`, or they measured different things.

    What to do: measure both with the same command and the same release of kvframework-bench."""


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
