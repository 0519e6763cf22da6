"""Owns where a hit's processor time goes, by a profiler, as a help: it makes every call slower, short ones most.

In the engine's process, for one thread: the profiler sees that one only.
"""

from __future__ import annotations

import cProfile
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from kvframework.bench.contention.document import HotSpot

# It counts its own end among the calls.
_PROFILER = "_lsprof"


class Entry(NamedTuple):
    """What the profiler says of a function: its code (the name of one that has none), calls, and own seconds."""

    code: CodeType | str
    calls: int
    own_s: float


def profiled(call: Callable[[], object], count: int) -> list[Entry]:
    """`count` calls under the profiler, whose clock is this thread's processor time: who waits costs nothing."""
    profile = cProfile.Profile(time.thread_time_ns, 1e-9)
    for _ in range(count):
        profile.runcall(call)
    profile.disable()
    return [
        Entry(entry.code, entry.callcount, entry.inlinetime)
        for entry in profile.getstats()
        if _PROFILER not in str(entry.code)
    ]


def hottest(entries: Iterable[Entry], count: int, *, top: int, without: Collection[str]) -> list[HotSpot]:
    """The `top` functions by own time, of `count` calls, but for those of the files `without`."""
    kept = [entry for entry in entries if isinstance(entry.code, str) or entry.code.co_filename not in without]
    total = sum(entry.own_s for entry in kept)
    ordered = sorted(kept, key=lambda entry: entry.own_s, reverse=True)[:top]
    return [
        HotSpot(_name(entry.code), entry.calls / count, entry.own_s / count * 1e6, entry.own_s / total)
        for entry in ordered
    ]


def _name(code: CodeType | str) -> str:
    if isinstance(code, str):
        return code.strip("<>")
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}: {getattr(code, 'co_qualname', code.co_name)}"
