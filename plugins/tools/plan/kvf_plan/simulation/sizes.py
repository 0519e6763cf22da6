"""The settings of a simulation, checked, and in its own units: so that no bytes move, each byte of an object stands for
those of a token, and each place in L1 for an object's."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass, replace

from msgspec import structs

from kvf_plan.errors import SimulationError
from kvf_plan.simulation.settings import Settings, TierSpeed
from kvframework.api.layout import CHUNK_BYTES, KVLayout, LayerGroup, with_chunk
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import TierProvider
from kvframework.config.schema import LEAST_CHUNK, MOST_CHUNK, Config, L2Keys
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import resolve_table
from kvframework.storage.l1.entries import rounded

MAX_ENGINES = 1024
MAX_BYTES_PER_TOKEN = 1 << 30
_LEAST_RATE, _LONGEST_S = math.ulp(0.0), sys.float_info.max
_LEAST_OBJECTS = 128
# Tiers that hold what other nodes have stored.
OF_OTHER_NODES = ("peers",)


@dataclass(frozen=True)
class SimulatedTier:
    """One `[[l2]]`, with the numbers that its provider has where the configuration has none."""

    speed: TierSpeed
    keys: L2Keys
    loads: int
    writes: int


@dataclass(frozen=True)
class Sizes:
    """`scale` bytes, those of a token, are one byte of the simulation. `l1_bytes` are scaled, `l1_capacity` is not."""

    config: Config
    chunk_tokens: int
    scale: int
    l1_bytes: int
    l1_capacity: int
    tiers: tuple[SimulatedTier, ...]

    @property
    def object_bytes(self) -> int:
        """What an object has for good."""
        return self.chunk_tokens * self.scale

    @property
    def place_bytes(self) -> int:
        """The bytes of a place in L1 that one takes."""
        return rounded(self.chunk_tokens)


def sizes_of(settings: Settings, registry: PluginRegistry, of_trace: int) -> Sizes:
    """Check the settings, for a trace whose chunks have `of_trace` tokens. Raises `SimulationError`, and `ConfigError`
    and `PluginError` for the configuration."""
    config = settings.config
    _check_numbers(settings)
    _, memory = resolve_table(registry, config.l1.memory, MemoryProvider)
    capacity = getattr(memory, "capacity", None)
    if not isinstance(capacity, int):
        raise SimulationError(
            f"the memory {config.l1.memory.use!r} does not report its size",
            where=config.l1.memory.where,
            available="a memory with the option `capacity`",
        )
    chunk = config.server.chunk_size or _chunk_of(settings.bytes_per_token, of_trace, capacity)
    whole = chunk * settings.bytes_per_token
    if rounded(whole) > capacity:
        raise SimulationError(
            f"L1 has {ByteSize(capacity)}, and one chunk of {chunk} tokens takes {ByteSize(rounded(whole))}",
            where=config.l1.memory.where,
            available=f"{ByteSize(settings.bytes_per_token)} per token",
            hint="set --bytes-per-token to your model's, or raise [l1] capacity",
        )
    return Sizes(
        structs.replace(config, server=structs.replace(config.server, chunk_size=chunk)),
        chunk,
        settings.bytes_per_token,
        capacity * rounded(chunk) // rounded(whole),
        capacity,
        _tiers(settings, registry),
    )


def _chunk_of(bytes_per_token: int, of_trace: int, capacity: int) -> int:
    """Return the tokens of a chunk of a model with one layer group, where the server leaves them to the model. Where
    these divide the trace's chunk, of which no part is found alone, and L1 has room for many, that is one object."""
    group = LayerGroup(1, 1, 1, min(bytes_per_token, CHUNK_BYTES), "uint8", planes=1)
    chunk = with_chunk(KVLayout("paged", (group,)), LEAST_CHUNK, MOST_CHUNK).chunk_tokens
    few = _LEAST_OBJECTS * of_trace * bytes_per_token > capacity
    return chunk if of_trace % chunk or few else of_trace


def tier_names(config: Config) -> list[str]:
    """Return the name of each `[[l2]]`: its `use`, with a number from the second of one name on."""
    seen: Counter[str] = Counter()
    names = []
    for table in config.l2:
        use = table.tier.use
        seen[use] += 1
        names.append(use if seen[use] == 1 else f"{use}#{seen[use]}")
    return names


def _tiers(settings: Settings, registry: PluginRegistry) -> tuple[SimulatedTier, ...]:
    names = tier_names(settings.config)
    speeds = {speed.name: speed for speed in settings.tiers}
    for speed in settings.tiers:
        if speed.name not in names:
            raise SimulationError(
                f"unknown tier {speed.name!r}",
                where="tiers",
                available=", ".join(names) or "no [[l2]] is configured",
                hint="give the `use` of an [[l2]] table of the configuration",
            )
    if len(speeds) < len(settings.tiers):
        raise SimulationError("a tier has more than one speed", where="tiers", available="one speed for each [[l2]]")
    found = []
    for name, table in zip(names, settings.config.l2, strict=True):
        if table.tier.use in OF_OTHER_NODES:
            raise SimulationError(
                f"the tier {name!r} reads from other nodes, but only one node is simulated",
                where=table.tier.where,
                hint="leave out this [[l2]]",
            )
        provider, options = resolve_table(registry, table.tier, TierProvider)
        if name not in speeds:
            raise SimulationError(
                f"the speed of the tier {name!r} is missing",
                where=table.tier.where,
                available="bytes per second",
                hint=f"give the speed: --tier {name}=3GB/s",
            )
        speed, keys = speeds[name], table.keys
        if speed.capacity_bytes is None and isinstance(capacity := getattr(options, "capacity", None), int):
            speed = replace(speed, capacity_bytes=capacity or None)
        found.append(SimulatedTier(speed, keys, keys.loads or provider.loads, keys.writes or provider.writes))
    return tuple(found)


def _check_numbers(settings: Settings) -> None:
    """Check each number that is there against the least and the most that it may be."""
    bounds: list[tuple[str, float | None, float, float]] = [
        ("bytes_per_token", settings.bytes_per_token, 1, MAX_BYTES_PER_TOKEN)
    ]
    if (engines := settings.engines) is not None:
        bounds += [
            ("engines: count", engines.count, 1, MAX_ENGINES),
            # Those of `EngineSpeed`: longer times than that are none.
            ("engines: tokens_per_s", engines.tokens_per_s, 1e-3, 1e12),
            ("engines: attention_tokens", engines.attention_tokens, 0, 1e12),
            ("engines: lookahead", engines.lookahead, 0, math.inf),
        ]
    for speed in settings.tiers:
        tier = f"tier {speed.name}"
        bounds += [
            (f"{tier}: read_bytes_per_s", speed.read_bytes_per_s, _LEAST_RATE, math.inf),
            (f"{tier}: write_bytes_per_s", speed.write_bytes_per_s, _LEAST_RATE, math.inf),
            (f"{tier}: latency_s", speed.latency_s, 0, _LONGEST_S),
            (f"{tier}: capacity_bytes", speed.capacity_bytes, 1, math.inf),
        ]
        for slow in speed.slow:
            bounds += [
                (f"{tier}: slow: begin_s", slow.begin_s, 0, _LONGEST_S),
                (f"{tier}: slow: end_s", slow.end_s, math.nextafter(slow.begin_s, math.inf), _LONGEST_S),
                (f"{tier}: slow: factor", slow.factor, 0, sys.float_info.max),
            ]
    for where, value, least, most in bounds:
        if value is not None and not least <= value <= most:
            raise SimulationError(f"{value} is out of bounds", where=where, available=f"{least:g} to {most:g}")
