"""Engines of different tensor- and pipeline-parallel sizes, and of different layouts, share every byte at a real
server, over both paths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvframework.client import KVClient, ModelPart, WorkerAdapter
from tests.core.shards.model import BLOCK, CHUNK, FORMS, TOKENS, Model, SplitEngine, hashed
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.torch

SIZES = (1, 2, 4, 8)
IDS = count(1, 64)
BLOCK_AND_MORE = 21


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    settings = (f"server.chunk_size={CHUNK}", "server.tp_lcm=8", "server.pp_lcm=4")
    with ServerProcess(*settings, capacity="16MiB") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[KVClient]:
    with server.engine_client() as connected:
        yield connected


def prompt(number: int) -> list[int]:
    return [number * 1000 + token for token in range(TOKENS)]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_split_of_any_model_in_any_layout_is_shared(client: KVClient, data: st.DataObject) -> None:
    planes = data.draw(st.sampled_from([2, 2, 1]))
    heads = 1 if planes == 1 else data.draw(st.sampled_from([1, 2, 4, 8, 16, 24]))
    model = Model(
        heads=heads,
        layers=data.draw(st.sampled_from([1, 2, 4, 6])),
        dim=data.draw(st.sampled_from([1, 3, 8])),
        dtype=data.draw(st.sampled_from(["bfloat16", "float16", "float32", "uint8"])),
        planes=planes,
        window=data.draw(st.sampled_from([0, 0, 20])),
    )
    stages = [pp for pp in (1, 2, 4) if model.layers % pp == 0]
    forms = [form for form in FORMS if planes == 2 or form != "pairs"]
    seed = data.draw(st.integers(0, 1 << 16))
    number, skip = next(IDS), data.draw(st.sampled_from([0, 5, BLOCK_AND_MORE]))
    whole = model.content(seed)

    def engine(content: torch.Tensor | None) -> SplitEngine:
        return SplitEngine(
            client,
            next(IDS),
            model,
            data.draw(st.sampled_from(SIZES)),
            pp=data.draw(st.sampled_from(stages)),
            form=data.draw(st.sampled_from(forms)),
            content=content,
            path=data.draw(st.sampled_from(["arena", "wire"])),
        )

    with engine(whole) as storing:
        storing.store(prompt(number))
    with engine(None) as loading:
        assert loading.hit(prompt(number)) == TOKENS
        if not model.window:
            assert all(loading.load(prompt(number), skip))
            loading.expect(whole, skip)
        else:
            assert all(loading.load(prompt(number)))
            loading.expect(whole, TOKENS - CHUNK)


def test_a_hit_needs_every_shard_of_the_model(client: KVClient) -> None:
    model, tokens = Model(), prompt(next(IDS))
    with SplitEngine(client, next(IDS), model, 4, content=model.content(1)) as engine:
        halves = engine.ranks
        engine.ranks = halves[:3]
        engine.store(tokens)
        with SplitEngine(client, next(IDS), model, 1) as other:
            assert other.hit(tokens) == 0
            assert other.load(tokens) == [False]
            engine.ranks = halves[3:]
            engine.store(tokens)
            assert other.hit(tokens) == TOKENS
        engine.ranks = halves


def test_what_is_no_whole_shard_keeps_the_names_of_its_sizes(
    client: KVClient, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(heads=6, layers=2)
    tokens = prompt(next(IDS))
    with SplitEngine(client, next(IDS), model, 3, content=model.content(1)) as engine:
        assert "size 3 does not divide tp_lcm, 8" in caplog.text
        assert engine.store(tokens) == [2, 2, 2]
        assert engine.hit(tokens) == TOKENS
        with SplitEngine(client, next(IDS), model, 1) as other:
            assert other.hit(tokens) == 0, "another name"
        with SplitEngine(client, next(IDS), model, 3) as same:
            assert all(same.load(tokens))
            same.expect(model.content(1))


def test_an_integration_that_does_not_know_the_model_keeps_its_names(client: KVClient) -> None:
    tokens, model = prompt(next(IDS)), Model()
    with SplitEngine(client, next(IDS), model, 8, content=model.content(1)) as engine:
        engine.store(tokens)
        with SplitEngine(client, next(IDS), model, 8, known=False) as other:
            assert other.ranks[0].registration.namespace != engine.ranks[0].registration.namespace
            assert other.hit(tokens) == 0


def test_a_server_without_the_setting_has_the_names_of_before() -> None:
    model = Model()
    with (
        ServerProcess(f"server.chunk_size={CHUNK}") as server,
        server.engine_client() as client,
        SplitEngine(client, 1, model, 2) as known,
        SplitEngine(client, 11, model, 2, known=False) as unknown,
    ):
        mine, theirs = known.ranks[1].registration, unknown.ranks[1].registration
        assert mine == msgspec.structs.replace(theirs, instance_id=mine.instance_id, since=mine.since)


def test_layers_with_and_without_a_window_are_split_alike(client: KVClient) -> None:
    """Two layer groups, of which each shard has its part, and blocks of their own."""
    heads, dim, window = 4, 8, 20
    whole = torch.randn(2, 2, TOKENS, heads, dim)  # layer, plane, token, head, dim

    def ranks(tp: int, first_id: int, content: torch.Tensor) -> list[tuple[WorkerAdapter, torch.Tensor]]:
        held = []
        for rank in range(tp):
            part = content[:, :, :, rank * heads // tp : (rank + 1) * heads // tp].unflatten(2, (-1, BLOCK)).clone()
            worker = WorkerAdapter(
                client,
                instance_id=first_id + rank,
                model_name="hybrid",
                world_size=tp,
                rank=rank,
                layout_options={
                    "groups": [
                        {"layers": ["full"], "block_size": BLOCK, "axes": FORMS["NHD"]},
                        {"layers": ["near"], "block_size": BLOCK, "axes": FORMS["NHD"], "window": window},
                    ]
                },
                part=ModelPart(heads, rank, tp),
            )
            worker.register_kv_caches({"full": part[0], "near": part[1]}, block_size=BLOCK)
            held.append((worker, part))
        return held

    blocks = list(range(TOKENS // BLOCK))
    tokens = prompt(next(IDS))
    first = ranks(2, 10**6, whole)
    stored = [
        worker.submit_store(hashed(client, tokens), 0, TOKENS, [blocks, blocks]).result(60) for worker, _ in first
    ]
    assert [each.stored for each in stored] == [8, 8], "two chunks of two groups of two shards"
    second = [*ranks(1, 10**6 + 10, torch.zeros_like(whole)), *ranks(4, 10**6 + 20, torch.zeros_like(whole))]
    for worker, part in second:
        assert worker.submit_retrieve(hashed(client, tokens), 0, TOKENS, [blocks, blocks]).result(60).ok
        own = worker.part
        at = own.tp_rank * heads // own.tp_size
        wanted = whole[:, :, :, at : at + heads // own.tp_size].unflatten(2, (-1, BLOCK))
        assert torch.equal(part[0], wanted[0])
        assert torch.equal(part[1, :, TOKENS // BLOCK // 2 :], wanted[1, :, TOKENS // BLOCK // 2 :])
    for worker, _ in [*first, *second]:
        worker.close()
