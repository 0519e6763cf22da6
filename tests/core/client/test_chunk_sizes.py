"""Chunks whose size the server leaves to the model: the rule, and what engines, old clients and the eight-field
registration get from a real server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvframework.api.keys import compute_namespace
from kvframework.api.layout import CHUNK_BYTES, KVLayout, LayerGroup, canonical_desc, with_chunk
from kvframework.client import KVClient
from kvframework.errors import BadLayout
from kvframework.service.keys import MAX_OBJECTS
from kvframework.wire import messages as m
from kvframework.wire.protocol import non_gpu_namespace
from tests.support.engines import BLOCK, LAYERS, PagedEngine
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

pytestmark = pytest.mark.torch

GROUPS = st.lists(
    st.builds(
        LayerGroup,
        num_layers=st.integers(1, 12),
        block_size=st.sampled_from([1, 8, 16, 48, 64, 128]),
        heads=st.sampled_from([1, 8]),
        head_dim=st.sampled_from([1, 64, 128]),
        dtype=st.sampled_from(["float32", "bfloat16", "uint8"]),
        planes=st.sampled_from([1, 2]),
    ),
    min_size=1,
    max_size=5,
)
# 4 KiB a token, of all layers and planes.
WIDE = 4096 // (2 * LAYERS * 4)


@given(GROUPS)
def test_the_fewest_tokens_at_which_an_object_is_large_enough(groups: list[LayerGroup]) -> None:
    layout = KVLayout("paged", tuple(groups))
    chunk = with_chunk(layout, 64, 256).chunk_tokens
    whole = {size: canonical_desc(layout, size) for size in (64, 128, 256)}
    assert chunk in {desc.chunk_tokens for desc in whole.values()}
    enough = [
        size
        for size, desc in whole.items()
        if size * 8 * 4096 >= 131_072 * 8 * len(groups)
        and max(group.nbytes * size // desc.chunk_tokens for group in desc.groups) >= CHUNK_BYTES
    ]
    assert chunk == whole[min(enough, default=256)].chunk_tokens
    if chunk < 256:
        assert 131_072 // chunk * 8 * len(groups) <= MAX_OBJECTS


@pytest.mark.parametrize(
    ("change", "least"),
    [({"chunk_tokens": 512}, 64), ({}, 0), ({"groups": (LayerGroup(64, 16, 8, 128, "bfloat16", state=True),)}, 64)],
    ids=["the engine names its chunk", "the server does", "a recurrent state"],
)
def test_other_declarations_stay_as_they_are(change: dict[str, object], least: int) -> None:
    layout = replace(KVLayout("paged", (LayerGroup(64, 16, 8, 128, "bfloat16"),)), **change)
    assert with_chunk(layout, least, 256) == layout


@pytest.mark.parametrize(("wide", "chunk"), [(WIDE, 64), (WIDE // 2, 128), (8, 256)])
def test_an_engine_stores_and_loads_chunks_of_its_model(wide: int, chunk: int) -> None:
    with ServerProcess() as server, KVClient(server.endpoint) as client:
        engine = PagedEngine(client, wide=wide, blocks=2 * chunk // BLOCK)
        assert engine.chunk == chunk
        blocks, others = list(range(chunk // BLOCK)), list(range(chunk // BLOCK, 2 * chunk // BLOCK))
        request = engine.request(list(range(chunk)))
        assert engine.store(request, blocks)
        assert engine.hit(engine.request(list(range(chunk + BLOCK)))) == chunk
        assert engine.retrieve(request, others)
        assert engine.tokens(blocks).equal(engine.tokens(others))
        with WireClient(server.endpoint) as looking:
            assert [each["chunk_tokens"] for each in looking.status()["instances"]] == [chunk]


@pytest.mark.parametrize(("forced", "chunk"), [(192, 192), (4 * BLOCK + 1, 5 * BLOCK), (1, BLOCK)])
def test_the_configured_chunk_is_that_of_every_model_in_whole_blocks(forced: int, chunk: int) -> None:
    with ServerProcess(f"server.chunk_size={forced}") as server, KVClient(server.endpoint) as client:
        assert (client.hello.chunk_size, client.hello.least_chunk) == (forced, 0)
        engine = PagedEngine(client, wide=WIDE, blocks=2 * chunk // BLOCK)
        assert engine.store(engine.request(list(range(2 * chunk))), list(range(2 * chunk // BLOCK)))
        assert engine.hit(engine.request(list(range(2 * chunk - 1)))) == chunk
        assert [each["chunk_tokens"] for each in server.status()["instances"]] == [chunk]


def test_a_configured_chunk_whose_object_is_too_large_is_named() -> None:
    layout = KVLayout("paged", (LayerGroup(64, 48, 8, 128, "bfloat16", planes=2),))
    with pytest.raises(BadLayout, match=r"(?s)one object of this layout.* lower chunk_size"):
        canonical_desc(layout, 65536)


@pytest.mark.parametrize("settings", [(), ("server.chunk_size=256",), ("server.chunk_size=256", "server.chunk_size=0")])
def test_an_engine_keeps_its_chunk_at_a_server_that_sizes_chunks_by_another_rule(settings: tuple[str, ...]) -> None:
    with ServerProcess(*settings[:-1]) as server, KVClient(server.endpoint, deadline_scale=20.0) as client:
        engine = PagedEngine(client, wide=WIDE)
        boot, blocks = client.hello.boot_id, list(range(engine.chunk // BLOCK))
        server.stop()
        server.set(*settings[-1:])
        server.start()
        wait_until(lambda: client.hello.boot_id != boot and len(server.status()["instances"]) == 1, 60, "the engine")
        request = engine.request(list(range(engine.chunk)))
        # The server lists the engine a moment before the engine knows.
        wait_until(lambda: engine.store(request, blocks), 60, "the store")
        assert engine.hit(request) == engine.chunk


def test_servers_of_one_redis_whose_chunks_follow_other_rules_share_nothing(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis, ExitStack() as stack:
        tier, rule = ("l2.0.use=redis", f"l2.0.url={redis.url}"), "server.chunk_size=256"
        first, other = (stack.enter_context(ServerProcess(*tier, *more)) for more in ((), (rule,)))
        clients = [stack.enter_context(KVClient(each.endpoint, deadline_scale=20.0)) for each in (first, other)]
        engines = [PagedEngine(each, wide=WIDE, blocks=512 // BLOCK) for each in clients]
        assert [engine.chunk for engine in engines] == [64, 256]
        for server, engine in zip((first, other), engines, strict=True):
            request = engine.request(list(range(256)))
            assert engine.hit(request) == 0
            assert engine.store(request, list(range(256 // BLOCK)))
            wait_until(lambda server=server: server.status()["l2"][0]["write_pending"] == 0, 60, "the writes")
            assert engine.hit(request) == 256
        assert [each.status()["l2"][0]["state"] for each in (first, other)] == [
            "closed",
            "closed",
        ]  # the breakers: no call failed


def test_an_older_client_and_the_eight_fields_beside_an_engine() -> None:
    with ServerProcess() as server, WireClient(server.endpoint) as client:
        hello = client.hello
        assert (hello.chunk_size, hello.least_chunk) == (256, 64)
        payload = m.RegisterNonGpuContextPayload(7, "m", 1, BLOCK, LAYERS, WIDE, "float32", False)
        registered = client.call("REGISTER_KV_CACHE_NON_GPU_CONTEXT", payload)
        assert registered.desc.chunk_tokens == 64
        assert registered.namespace == non_gpu_namespace(payload, hello.hasher_fingerprint, 256, hello.least_chunk)
        # It does not know `least_chunk`, and declares no chunk.
        layout = KVLayout("paged", (LayerGroup(LAYERS, BLOCK, 1, WIDE, "float32", axes=("block", "token", "dim")),))
        desc = canonical_desc(layout, hello.chunk_size)
        namespace = compute_namespace(model="m", desc=desc, hasher_fingerprint=hello.hasher_fingerprint, world_size=1)
        older = client.call("REGISTER_KV_CACHE", m.RegisterKvCache(8, "m", 1, 0, namespace, "cpu_gather", layout))
        assert older.desc.chunk_tokens == 256
