"""What the connectors of vLLM, SGLang and transformers declare of ranks of different sizes names the same shards, and
holds the same bytes, at a real server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvf_sglang.cache import Worker
from kvf_sglang.pools import form_of
from kvf_vllm.attach import AttachedInstance
from kvf_vllm.canonical import CanonicalBlocks, LayerForm
from kvf_vllm.facts import part_of, place_of
from kvf_vllm.layouts import GroupFacts
from kvf_vllm.options import VllmOptions
from kvf_vllm.step_messages import TransferOp
from kvframework.client import KVClient, KvIdentity, RequestHashes, WorkerAdapter
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess, client_fixture, server_fixture

pytestmark = pytest.mark.torch

HEADS, LAYERS, DIM, BLOCK, CHUNK = 8, 2, 8, 16, 32
TOKENS = 2 * CHUNK
PROMPT = list(range(TOKENS))
# vLLM's own words for the model.
MODEL = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS, get_total_num_hidden_layers=lambda: LAYERS)


server = server_fixture(f"server.chunk_size={CHUNK}", "server.tp_lcm=8", "server.pp_lcm=2", scope="module")


client = client_fixture(engine=True, emptied=True)


@pytest.fixture
def whole() -> torch.Tensor:
    """`[plane, layer, token, head, dim]`."""
    return content()


def content() -> torch.Tensor:
    return torch.randn(2, LAYERS, TOKENS, HEADS, DIM)


def hashed(client: KVClient) -> RequestHashes:
    request = RequestHashes(client.hasher, CHUNK, request_id="r")
    request.extend(PROMPT)
    return request


def held_heads(rank: int, size: int) -> tuple[int, int]:
    """The first head of a rank, and how many it has: one that others have, too, if there are fewer heads than ranks."""
    return rank * HEADS // size, max(HEADS // size, 1)


def vllm_blocks(backend: str, part: torch.Tensor) -> torch.Tensor:
    """`[layer, block, head, slot, 2 * dim]` of all tokens, as vLLM's backend holds them in its blocks."""
    planes = part.unflatten(2, (-1, BLOCK)).transpose(3, 4)  # plane, layer, block, head, slot, dim
    if backend == "FLASH_ATTN":
        return torch.cat(list(planes), dim=-1)
    keys, values = planes[0].transpose(3, 4).flatten(3), planes[1].flatten(3)
    return torch.cat([keys, values], dim=-1).unflatten(-1, (BLOCK, 2 * DIM))


class Vllm:
    """The connector of a vLLM engine of `size` workers in each of `stages`, as far as it moves bytes."""

    def __init__(
        self, client: KVClient, size: int, isa: str, backend: str, whole: torch.Tensor | None = None, *, stages: int = 1
    ) -> None:
        self.client, self.isa, self.backend, self.size, self.held = client, isa, backend, size, LAYERS // stages
        self.memory, self.ranks, own = [], [], held_heads(0, size)[1]
        for number in range(size * stages):
            parallel = SimpleNamespace(rank=number, world_size=size * stages, pipeline_parallel_size=stages)
            place = place_of(parallel, None)
            names = tuple(f"l.{place.stage * self.held + index}" for index in range(self.held))
            groups = (GroupFacts(names, BLOCK),)
            described = LayerForm(
                backend, isa, "LBHNC", "FullAttentionSpec", "float32", "float32", "auto", own, DIM, DIM, BLOCK
            )
            memory = torch.zeros(self.held, TOKENS // BLOCK + 1, own, BLOCK, 2 * DIM)
            if whole is not None:
                memory[:, 1:] = self.wanted(whole, number)
            self.memory.append(memory)
            instance = AttachedInstance(
                client,
                VllmOptions(connect_timeout_s=30.0),
                identity=KvIdentity("m", "r"),
                groups=groups,
                form=CanonicalBlocks(dict.fromkeys(names, described)),
                rank=place.rank,
                world_size=place.world_size,
                num_blocks=memory.shape[1],
                stage=place.stage,
                part=part_of(MODEL, parallel, place, groups),
            )
            instance.attach({name: memory[index] for index, name in enumerate(names)})
            self.ranks.append(instance)
        assert {rank.served for rank in self.ranks} == {self.ranks[0].served}, "one question for all"

    def wanted(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        stage, rank = divmod(number, self.size)
        first, own = held_heads(rank, self.size)
        layers = whole[:, stage * self.held : (stage + 1) * self.held]
        return vllm_blocks(self.backend, layers[:, :, :, first : first + own])

    def store(self) -> None:
        op = TransferOp("r", 0, TOKENS, hashed(self.client).digests(TOKENS), "", [[1, 2, 3, 4]])
        for rank in self.ranks:
            assert rank.store([op])[0].result(60).ok
            assert rank.nbytes(op) == 2 * LAYERS * TOKENS * HEADS // len(self.ranks) * DIM * 4

    def load(self, whole: torch.Tensor) -> None:
        op = TransferOp("r", 0, TOKENS, hashed(self.client).digests(TOKENS), "", [[1, 2, 3, 4]])
        for number, rank in enumerate(self.ranks):
            assert rank.load([op])[0].result(60).ok
            assert torch.equal(self.memory[number][:, 1:], self.wanted(whole, number))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class MHATokenToKVPoolHost:
    """SGLang's host pool by its name and attributes."""

    page_size, dcp_size, head_dim, v_head_dim = CHUNK, 1, DIM, DIM

    def __init__(self, layout: str, heads: int) -> None:
        pages = TOKENS // CHUNK
        shapes = {
            "layer_first": (2, LAYERS, TOKENS, heads, DIM),
            "page_first": (2, TOKENS, LAYERS, heads, DIM),
            "page_head": (2, pages, heads, CHUNK, LAYERS, DIM),
        }
        self.layout, self.kv_buffer = layout, torch.zeros(shapes[layout])

    def content(self) -> torch.Tensor:
        """A view, `[plane, layer, token, head, dim]`, of a pool in pages: `[plane, layer, page, token, head, dim]`."""
        if self.layout == "page_head":
            return self.kv_buffer.permute(0, 4, 1, 3, 2, 5)
        return self.kv_buffer if self.layout == "layer_first" else self.kv_buffer.transpose(1, 2)


class Sglang:
    """SGLang's pools of `size` ranks."""

    def __init__(self, client: KVClient, size: int, layout: str, first_id: int, whole: torch.Tensor | None) -> None:
        self.client, self.size, self.own, self.pools, self.ranks = client, size, held_heads(0, size)[1], [], []
        for rank in range(size):
            pool = MHATokenToKVPoolHost(layout, self.own)
            if whole is not None:
                pool.content().copy_(self.part(whole, rank).view(pool.content().shape))
            form = form_of(pool, CHUNK)
            place = Worker(tp_rank=rank, tp_size=size, kv_heads=HEADS).place(per_head=form.per_head)
            worker = WorkerAdapter(
                client,
                instance_id=first_id + rank,
                model_name="m",
                revision="r",
                world_size=place.world_size,
                rank=place.rank,
                layout_options=form.options,
                part=place.part,
            )
            worker.register_kv_caches(form.tensors, block_size=CHUNK)
            self.pools.append(pool)
            self.ranks.append(worker)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        first, own = held_heads(rank, self.size)
        return whole[:, :, :, first : first + own].contiguous()

    def store(self) -> None:
        for worker in self.ranks:
            assert worker.submit_store(hashed(self.client), 0, TOKENS, [[0, 1]]).result(60).ok

    def load(self, whole: torch.Tensor) -> None:
        for rank, (worker, pool) in enumerate(zip(self.ranks, self.pools, strict=True)):
            assert worker.submit_retrieve(hashed(self.client), 0, TOKENS, [[0, 1]]).result(60).ok
            assert torch.equal(pool.content().reshape(2, LAYERS, TOKENS, self.own, DIM), self.part(whole, rank))

    def close(self) -> None:
        for worker in self.ranks:
            worker.close()


class Transformers:
    """A session of transformers, which has the whole model."""

    def __init__(self, server: ServerProcess) -> None:
        from kvf_transformers.cache_form import CacheForm
        from kvf_transformers.identity import ModelNow
        from kvf_transformers.session import CacheSession

        template = torch.empty(1, HEADS, 0, DIM)
        form = CacheForm(((template, template),) * LAYERS, tuple(range(LAYERS)), kv_heads=HEADS)
        self.now = ModelNow(KvIdentity("m", "r"), "cpu", form)
        self.session = CacheSession(
            endpoint=server.endpoint,
            cache_salt="",
            transport="auto",
            connect_timeout_s=30.0,
            deadline_scale=20.0,
            transfer_timeout_s=60.0,
        )
        self.session.attach(self.now, 30.0)

    def store(self, whole: torch.Tensor) -> None:
        pairs = [tuple(plane[None].transpose(1, 2) for plane in layer) for layer in whole.transpose(0, 1)]
        assert self.session.store(self.now, PROMPT, pairs).tokens == TOKENS

    def load(self, whole: torch.Tensor) -> None:
        # One token is always left to compute.
        pairs = self.session.load(self.now, [*PROMPT, 7]).pairs
        assert torch.equal(torch.stack([torch.stack(pair) for pair in pairs])[:, :, 0], whole.permute(1, 0, 3, 2, 4))

    def close(self) -> None:
        self.session.close()


@pytest.mark.parametrize("stored", ["vllm", "stages", "sglang", "transformers"])
def test_each_engine_loads_what_another_kind_of_another_size_stored(
    server: ServerProcess, client: KVClient, whole: torch.Tensor, stored: str
) -> None:
    pytest.importorskip("transformers")
    there = Transformers(server)
    engines = [
        Vllm(client, 1, "vec", "CPU_ATTN"),
        Vllm(client, 4, "", "FLASH_ATTN"),
        Vllm(client, 8, "vec16", "CPU_ATTN"),
        Vllm(client, 2, "", "FLASH_ATTN", stages=2),
        Sglang(client, 1, "page_first", 10, None),
        Sglang(client, 4, "page_head", 20, None),
        Sglang(client, 8, "page_first", 40, None),
        Sglang(client, 2, "layer_first", 30, None),
        there,
    ]
    source = {
        "vllm": lambda: Vllm(client, 2, "vec16", "CPU_ATTN", whole),
        "stages": lambda: Vllm(client, 1, "vec", "CPU_ATTN", whole, stages=2),
        "sglang": lambda: Sglang(client, 2, "page_head", 50, whole),
        "transformers": lambda: there,
    }[stored]()
    try:
        source.store(*([whole] if source is there else []))
        with server.client() as watcher:
            assert watcher.status()["l1"]["objects"] == HEADS * LAYERS * TOKENS // CHUNK
        for engine in engines:
            engine.load(whole)
    finally:
        for engine in [*engines, source]:
            engine.close()


def test_ranks_of_one_head_have_the_same_shard(
    server: ServerProcess, client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HEADS", 4)
    whole = content()
    engines = [Vllm(client, 8, "", "FLASH_ATTN"), Sglang(client, 8, "layer_first", 10, None)]
    source = Vllm(client, 2, "vec", "CPU_ATTN", whole)
    try:
        source.store()
        with server.client() as watcher:
            assert watcher.status()["l1"]["objects"] == 4 * LAYERS * TOKENS // CHUNK
        for engine in engines:
            engine.load(whole)
    finally:
        for engine in [*engines, source]:
            engine.close()
