"""The settings of a simulation, checked, and in its own units: so that no bytes move, each byte of an object stands for
those of a token, and each place in L1 for an object's."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from kvf_plan.errors import SimulationError
from kvf_plan.simulation.settings import Engines, Settings, TierSpeed
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import TierProvider
from kvframework.config.schema import Config, L2Keys
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import resolve_table
from kvframework.storage.l1.allocator import rounded

MAX_ENGINES = 1024
MAX_BYTES_PER_TOKEN = 1 << 30
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
    """`scale` bytes are one byte of the simulation, of which a token has `token_bytes`. `l1_bytes` are scaled,
    `l1_capacity` is not."""

    config: Config
    chunk_tokens: int
    scale: int
    token_bytes: int
    l1_bytes: int
    l1_capacity: int
    tiers: tuple[SimulatedTier, ...]

    @property
    def object_bytes(self) -> int:
        """What an object has for good."""
        return self.chunk_tokens * self.token_bytes * self.scale

    @property
    def place_bytes(self) -> int:
        """The bytes of a place in L1 that one takes."""
        return rounded(self.chunk_tokens * self.token_bytes)


def sizes_of(settings: Settings, registry: PluginRegistry) -> Sizes:
    """Check the settings. Raises `SimulationError`, and `ConfigError` and `PluginError` for the configuration."""
    config = settings.config
    _check_numbers(settings)
    chunk = config.server.chunk_size
    whole = chunk * settings.bytes_per_token
    _, memory = resolve_table(registry, config.l1.memory, MemoryProvider)
    capacity = getattr(memory, "capacity", None)
    if not isinstance(capacity, int):
        raise SimulationError(
            f"the memory {config.l1.memory.use!r} does not say how large it is",
            where=config.l1.memory.where,
            available="a memory with the option `capacity`",
        )
    if rounded(whole) > capacity:
        raise SimulationError(
            f"L1 has {ByteSize(capacity)}, and one chunk of {chunk} tokens takes {ByteSize(rounded(whole))}",
            where=config.l1.memory.where,
            available=f"{ByteSize(settings.bytes_per_token)} a token",
            hint="say the bytes of your model's token (--bytes-per-token), or give L1 more",
        )
    return Sizes(
        config,
        chunk,
        settings.bytes_per_token,
        1,
        capacity * rounded(chunk) // rounded(whole),
        capacity,
        _tiers(settings, registry),
    )


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
                f"there is no tier {speed.name!r}",
                where="tiers",
                available=", ".join(names) or "no [[l2]] is configured",
                hint="name an [[l2]] of the configuration by its `use`",
            )
    if len(speeds) < len(settings.tiers):
        raise SimulationError("a tier has two speeds", where="tiers", available="one for each [[l2]]")
    found = []
    for name, table in zip(names, settings.config.l2, strict=True):
        if table.tier.use in OF_OTHER_NODES:
            raise SimulationError(
                f"the tier {name!r} reads from other nodes, and one node is simulated",
                where=table.tier.where,
                hint="leave this [[l2]] out",
            )
        provider, options = resolve_table(registry, table.tier, TierProvider)
        if name not in speeds:
            raise SimulationError(
                f"how fast is the tier {name!r}?",
                where=table.tier.where,
                available="bytes a second",
                hint=f"say so: --tier {name}=3GB/s",
            )
        speed, keys = speeds[name], table.keys
        if speed.capacity_bytes is None and isinstance(capacity := getattr(options, "capacity", None), int):
            speed = replace(speed, capacity_bytes=capacity or None)
        found.append(SimulatedTier(speed, keys, keys.loads or provider.loads, keys.writes or provider.writes))
    return tuple(found)


def _check_numbers(settings: Settings) -> None:
    if not 1 <= settings.bytes_per_token <= MAX_BYTES_PER_TOKEN:
        raise _out_of_bounds("bytes_per_token", settings.bytes_per_token, f"1 to {MAX_BYTES_PER_TOKEN}")
    if settings.engines is not None:
        _check_engines(settings.engines)
    for speed in settings.tiers:
        where = f"tier {speed.name}"
        for name, rate in (
            ("read_bytes_per_s", speed.read_bytes_per_s),
            ("write_bytes_per_s", speed.write_bytes_per_s),
        ):
            if rate is not None and not rate > 0:
                raise _out_of_bounds(f"{where}: {name}", rate, "more than 0")
        if not 0 <= speed.latency_s < math.inf:
            raise _out_of_bounds(f"{where}: latency_s", speed.latency_s, "0 or more")
        if speed.capacity_bytes is not None and speed.capacity_bytes < 1:
            raise _out_of_bounds(f"{where}: capacity_bytes", speed.capacity_bytes, "1 or more, or none")
        for slow in speed.slow:
            if not (0 <= slow.begin_s < slow.end_s < math.inf and 0 <= slow.factor < math.inf):
                raise _out_of_bounds(f"{where}: slow", slow, "0 <= begin_s < end_s, and a factor of 0 or more")


def _check_engines(engines: Engines) -> None:
    if not 1 <= engines.count <= MAX_ENGINES:
        raise _out_of_bounds("engines: count", engines.count, f"1 to {MAX_ENGINES}")
    # Those of `EngineSpeed`: longer times than that are none.
    if not 1e-3 <= engines.tokens_per_s <= 1e12:
        raise _out_of_bounds("engines: tokens_per_s", engines.tokens_per_s, "0.001 to 1e12")
    if engines.lookahead is not None and engines.lookahead < 0:
        raise _out_of_bounds("engines: lookahead", engines.lookahead, "0 or more, or none")
    if not 0 <= engines.attention_tokens <= 1e12:
        raise _out_of_bounds("engines: attention_tokens", engines.attention_tokens, "0 for no term, to 1e12")


def _out_of_bounds(where: str, value: object, available: str) -> SimulationError:
    return SimulationError(f"{value} is out of bounds", where=where, available=available)
