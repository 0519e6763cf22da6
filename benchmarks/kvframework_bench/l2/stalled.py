"""The part `stalled`: LOOKUP of a prefix in L1 with a Redis behind it that has stopped answering, next to a server
without any L2."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage
from kvframework_bench.l2.figures import StalledRow
from kvframework_bench.l2.redis_server import running_redis
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import await_written, check_plugin, redis_settings, tier_status
from kvframework_bench.prefix import Prefixes, lookup_case, token_ids
from kvframework_bench.rounds import Case, Latency, interleave, ratio
from kvframework_bench.server import running_server

_ARENA_BYTES = 64 << 20


def bench_stalled(sizes: Sizes, directory: Path, registry: PluginRegistry, stage: Stage) -> list[StalledRow]:
    """Measure lookups. Raises `BenchUnavailable` without redis-py or a redis-server, and `BenchFailed`, also if a
    lookup is wrong."""
    check_plugin(registry, "tier", "redis")
    homes = [directory / name for name in ("without", "stalled")]
    for home in homes:
        home.mkdir()
    with ExitStack() as stack:
        redis = stack.enter_context(running_redis(directory))
        servers = [
            stack.enter_context(running_server(home, _ARENA_BYTES, settings))
            for home, settings in zip(homes, ([], redis_settings(redis.url)), strict=True)
        ]
        clients = [stack.enter_context(server.client()) for server in servers]
        prefixes = [Prefixes(client) for client in clients]
        for each in prefixes:
            each.store(each.request(token_ids(max(sizes.lookup_tokens), known=True)))
        await_written(servers[1], clients[1])
        # Servers end sooner once they can write their pending objects.
        stack.callback(redis.resume)
        redis.stall()
        # From here on the tier's threads hang: one with objects to write, one with a prompt to look for.
        unknown = prefixes[1].request(token_ids(1024, known=False))
        prefixes[1].store(unknown)
        elsewhere = prefixes[1].request(token_ids(2048, known=False))
        hanging = prefixes[1].scheduler().lookup(elsewhere)
        cases: dict[str, Case] = {}
        for tokens in sizes.lookup_tokens:
            for name, each in zip(("without", "stalled"), prefixes, strict=True):
                request = each.request(token_ids(tokens, known=True))
                cases[f"{name} {tokens}"] = lookup_case(each.scheduler(), request, tokens)
        with stage("looking up with a stalled Redis", sizes.lookup_rounds) as advance:
            measured = interleave(cases, rounds=sizes.lookup_rounds, calls=sizes.lookup_calls, advance=advance)
        prefixes[1].scheduler().free(hanging)
        tier = tier_status(clients[1])
    return [
        StalledRow(
            tokens=tokens,
            without_l2=Latency.of(measured[f"without {tokens}"]),
            stalled=Latency.of(measured[f"stalled {tokens}"]),
            ratio=ratio(measured[f"stalled {tokens}"], measured[f"without {tokens}"]),
            tier_state=str(tier["state"]),
            write_pending=int(tier["write_pending"]),
        )
        for tokens in sizes.lookup_tokens
    ]
