"""The measurement: each policy with each size of L1, in turn, in processor time."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvframework.api.eviction import EvictionPolicy, EvictionProvider
from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchFailed
from kvframework_bench.policy.figures import TARGETS, PolicyFigures, PolicyRow
from kvframework_bench.policy.replay import Replay
from kvframework_bench.policy.requests import Request, from_trace, made
from kvframework_bench.rounds import Spread


class PolicySizes(msgspec.Struct, frozen=True):
    """`objects` of L1; `blocks` of the made requests beyond those that fill the largest L1; none with a trace."""

    objects: tuple[int, ...]
    blocks: int
    rounds: int
    seed: int = 1


FULL = PolicySizes((10_000, 100_000), 200_000, 5)
QUICK = PolicySizes((500,), 2000, 1)


def bench_policy(
    sizes: PolicySizes, *, use: Sequence[str] = (), trace: Path | None = None, stage: Stage = no_progress
) -> PolicyFigures:
    """Measure; `use` are the names of policies, all that are installed by default. Raises `BenchFailed`, and the errors
    of the registry for a policy that cannot be loaded."""
    providers = _providers(use)
    requests = from_trace(trace) if trace is not None else made(2 * max(sizes.objects) + sizes.blocks, sizes.seed)
    rows = []
    with stage("policy", sizes.rounds * len(sizes.objects) * len(providers)) as advance:
        for objects in sizes.objects:
            times: dict[str, list[float]] = {provider.name: [] for provider in providers}
            rates: dict[str, float] = {}
            for number in range(sizes.rounds):
                for provider in providers[:: -1 if number % 2 else 1]:
                    us, rates[provider.name] = _measured(_new(provider), objects, requests, fills=trace is None)
                    times[provider.name].append(us)
                    advance()
            rows += [
                PolicyRow(name, objects, Spread.of(each), rates[name], TARGETS.get(name, 0.0))
                for name, each in times.items()
            ]
    blocks = sum(len(request.digests) for request in requests)
    return PolicyFigures(trace.name if trace is not None else "", len(requests), blocks, sizes.rounds, rows)


def _measured(policy: EvictionPolicy, objects: int, requests: Sequence[Request], *, fills: bool) -> tuple[float, float]:
    """Return the microseconds a block, and the hit rate. With `fills` neither counts the requests that come before L1
    has been filled twice."""
    replay = Replay(policy, objects)
    first = 0
    while fills and replay.blocks < 2 * objects:
        replay.run(requests[first : first + 1])
        first += 1
    before = (replay.blocks, replay.hits)
    gc.collect()
    gc.disable()  # the server's own, too: its objects make no circles
    try:
        began = time.process_time()
        replay.run(requests[first:])
        taken = time.process_time() - began
    finally:
        gc.enable()
    blocks, hits = replay.blocks - before[0], replay.hits - before[1]
    return 1e6 * taken / blocks, hits / blocks


def _providers(use: Sequence[str]) -> list[EvictionProvider]:  # type: ignore[type-arg]
    registry = PluginRegistry()
    names = use or sorted(registry.names("eviction"))
    found = [registry.resolve("eviction", name) for name in names]
    return [provider for provider in found if isinstance(provider, EvictionProvider)]


def _new(provider: EvictionProvider) -> EvictionPolicy:  # type: ignore[type-arg]
    try:
        return provider.create(provider.options())
    except TypeError:
        raise BenchFailed(
            f"the policy {provider.name} has options without a default", where="--use", hint="leave this policy out"
        ) from None
