"""Owns what `kvframework doctor` tells of an arena that is not made yet: whether there is memory for it."""

from __future__ import annotations

from kvf_pinned.available import available_memory
from kvf_pinned.options import PinnedOptions
from kvframework.api import ByteSize, Finding

_MOST = 0.9


def diagnose(options: PinnedOptions) -> list[Finding]:
    """Reads /proc and the cgroup files; takes no memory."""
    room = ByteSize(available_memory())
    fact = f"an arena of {options.capacity}, where {room} can be had"
    if options.capacity > room:
        advice = "lower [l1] capacity, or give the machine or the cgroup more memory"
        return [Finding("pinned.capacity", "fail", fact, advice)]
    if options.capacity > _MOST * room:
        advice = "leave 10 % for the server and its engines: lower [l1] capacity"
        return [Finding("pinned.capacity", "warn", fact, advice)]
    return [Finding("pinned.capacity", "ok", fact)]
