"""The part `memory`: the growth of a server outside its arena while objects go to Redis and back."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from kvframework.client import KVClient, RequestHashes
from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage
from kvframework_bench.errors import BenchFailed
from kvframework_bench.l2.figures import MemoryRow
from kvframework_bench.l2.redis_reference import bare_client
from kvframework_bench.l2.redis_server import running_redis
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import TIMEOUT_S, await_written, check_plugin, redis_settings
from kvframework_bench.prefix import Prefixes, shape_of, token_ids
from kvframework_bench.server import PeakMeter, emptied, running_server

_ARENA_SLACK = 32 << 20
_WAIT_S = 120.0


def bench_memory(sizes: Sizes, directory: Path, registry: PluginRegistry, codec: str, stage: Stage) -> list[MemoryRow]:
    """Measure the growth. Raises `BenchUnavailable` without redis-py, a redis-server or the codec's packages, and
    `BenchFailed`."""
    check_plugin(registry, "tier", "redis")
    check_plugin(registry, "codec", codec)
    prompt_bytes = sizes.object_bytes * sizes.prompt_objects
    with ExitStack() as stack:
        redis = stack.enter_context(running_redis(directory))
        settings = redis_settings(redis.url, codec=codec, timeout_s=TIMEOUT_S)
        server = stack.enter_context(running_server(directory, prompt_bytes + _ARENA_SLACK, settings))
        client = stack.enter_context(server.client())
        bare = stack.enter_context(bare_client(redis))
        prefixes = Prefixes(client, shape_of(sizes.object_bytes))
        request = prefixes.request(token_ids(sizes.prompt_objects * prefixes.chunk_tokens, known=True))
        advance = stack.enter_context(stage(f"memory, codec {codec}", 2 * sizes.prompts))
        content = like_kv(prefixes.object_bytes)
        rows = []
        for direction in ("written", "loaded"):
            meter = PeakMeter(server.child.pid)
            for _ in range(sizes.prompts):
                _clear(client)
                if direction == "written":
                    prefixes.store(request, lambda _nbytes: content)
                    await_written(server, client)
                else:
                    _load(prefixes, request)
                advance()
            rows.append(
                MemoryRow(
                    codec=codec,
                    direction=direction,
                    object_bytes=prefixes.object_bytes,
                    prompt_bytes=prompt_bytes,
                    nbytes=prompt_bytes * sizes.prompts,
                    growth_bytes=meter.growth(),
                    stored_bytes=bare.stored_bytes(),
                )
            )
    return rows


def like_kv(nbytes: int) -> bytes:
    """Return bytes that pack about as well as bfloat16 keys and values do: random mantissas, few exponents."""
    content = bytearray(os.urandom(nbytes))
    content[1::2] = (b"\x3e\x3f\xbe\xbf" * (nbytes // 8 + 1))[: nbytes // 2]
    return bytes(content)


def _clear(client: KVClient) -> None:
    cleared = emptied(client)
    if cleared.in_use:
        raise BenchFailed(f"L1 could not be emptied: {cleared.in_use} objects are in use")


def _load(prefixes: Prefixes, request: RequestHashes) -> None:
    scheduler = prefixes.scheduler()
    found = scheduler.wait(scheduler.lookup(request), _WAIT_S)
    scheduler.free(found)
    if found.hit_tokens != request.hashed_tokens:
        raise BenchFailed(f"a lookup found {found.hit_tokens} tokens", available=f"{request.hashed_tokens} tokens")
