"""What a simulation has found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """Of many durations, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class TierOutcome(msgspec.Struct, frozen=True):
    """One `[[l2]]`. `loaded` chunks came from it, bytes are those of objects, and `used_bytes` the most that it held.
    `dropped` objects were not written for want of time or room, `evicted` ones made room. `busy` is the share of the
    trace's time in which it read, and that in which it wrote, added where they are two ways."""

    name: str
    loaded: int
    read_bytes: int
    written_bytes: int
    used_bytes: int
    dropped: int
    evicted: int
    busy: float


class Outcome(msgspec.Struct, frozen=True):
    """`tokens` are those of all prompts, `asked_tokens` those that fill chunks, and `l1_tokens` and `l2_tokens` what L1
    and L2 had of them; `blocks` and theirs are the same in chunks of the server. `seconds` is the time from the first
    request to the last first token. `ttft_s` and the engines' seconds are None without engines. `l1_bytes` is what L1
    holds at the end. `misses` counts lookups that missed something, by reason. `status` is the server's own status
    document at the end; bytes of L1 are smaller there by `byte_scale`, and times are virtual."""

    requests: int
    seconds: float
    tokens: int
    asked_tokens: int
    l1_tokens: int
    l2_tokens: int
    blocks: int
    l1_blocks: int
    l2_blocks: int
    ttft_s: Spread | None
    engine_s: float | None
    l1_capacity_bytes: int
    l1_bytes: int
    evicted: int
    misses: Mapping[str, int]
    tiers: list[TierOutcome]
    byte_scale: float
    status: Mapping[str, Any]
