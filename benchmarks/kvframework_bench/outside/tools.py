"""What the bench knows of a tool: its version, its workloads, the command of each, and what its result file says."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.outside.load import OutsideSizes

_VERSION_S = 120.0


class Target(msgspec.Struct, frozen=True):
    """The engine that a tool asks, at `url`; `model` is its folder, which has the tokenizer; `trace` is a file of
    Mooncake's form with chunks of `chunk_tokens`. Equal seeds make equal prompts. `folder` is for what the tool
    writes."""

    url: str
    served: str
    model: Path
    trace: Path
    chunk_tokens: int
    seed: int
    folder: Path
    sizes: OutsideSizes


class Result(msgspec.Struct, frozen=True):
    """What a tool says: times in ms, `output_tokens_s` over its whole run."""

    completed: int
    failed: int
    first_mean_ms: float
    first_p50_ms: float
    first_p99_ms: float
    latency_mean_ms: float
    output_tokens_s: float


class Workload(NamedTuple):
    """`command(target)` runs it; `read(folder)` returns its result, and raises `OSError` or `msgspec.MsgspecError`
    without one."""

    name: str
    command: Callable[[Target], Sequence[str]]
    read: Callable[[Path], Result]


class Tool(Protocol):
    name: str
    # What differs from the setting in which others publish its figures.
    differs: str

    def version(self) -> str:
        """Return its version. Raises `BenchUnavailable` if it is not installed."""

    def environment(self, target: Target) -> Mapping[str, str]: ...

    def workloads(self) -> Sequence[Workload]: ...


def version_of(command: Sequence[str], hint: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the last line that a command prints. Raises `BenchUnavailable` with `hint` if it does not run."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            check=True,
            env=environment and dict(environment),
        )
        return done.stdout.split()[-1]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise BenchUnavailable(f"{command[0]} does not run: {error}", hint=hint) from error
