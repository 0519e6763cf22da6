"""Layouts against a real server process: objects shared between layouts, and the group rule for hits, end to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from kvframework.api.layout import NO_BLOCK, EngineView
from kvframework.client import KVClient, WorkerAdapter
from kvframework.errors import BadLayout, BadRange
from kvframework.wire.messages import Clear, Prepare, StorePlan
from tests.core.layouts.engines import Group, as_bytes, hold
from tests.support.engines import PagedEngine
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess, server_fixture

pytestmark = pytest.mark.torch


CHUNK = 256
FULL = Group(("plane", "block", "token", "head", "dim"), heads=2, dim=4, block_size=16)
WINDOW = Group(("block", "plane", "head", "token", "dim"), layers=3, heads=1, dim=8, block_size=32, window=300)
STATE = Group(("block", "dim"), layers=1, planes=1, heads=1, dim=20, block_size=64, state=True)
INDEX = Group(("block", "token", "dim"), layers=1, planes=1, heads=1, dim=6, block_size=64, compress_ratio=4)
HYBRID = (FULL, WINDOW, STATE, INDEX)


server = server_fixture(f"server.chunk_size={CHUNK}", capacity="8MiB", scope="module")


@pytest.fixture
def client(server: ServerProcess) -> Iterator[KVClient]:
    with server.engine_client() as connected:
        yield connected
    with server.client() as cleaner:
        cleaner.call("CLEAR", Clear())


def table(group: Group, pattern: str) -> dict[str, object]:
    return {
        "layers": [pattern],
        "axes": list(group.axes),
        "block_size": group.block_size,
        "window": group.window,
        "state": group.state,
        "compress_ratio": group.compress_ratio,
    }


class Engine(PagedEngine):
    def __init__(
        self,
        client: KVClient,
        instance_id: int,
        groups: Sequence[Group],
        tokens: int,
        *,
        seed: int | None = None,
        path: str = "auto",
    ) -> None:
        self.groups = groups
        kv: dict[str, object] = {}
        for index, group in enumerate(groups):
            content = group.content(tokens // group.block_size + 1, seed or 0)
            kv.update(hold(group, content if seed is not None else torch.zeros_like(content), f"g{index}."))
        tables = [table(group, f"g{index}.*") for index, group in enumerate(groups)]
        super().__init__(client, instance_id, kv=kv, path=path, layout="paged", layout_options={"groups": tables})

    def ids(self, tokens: int) -> list[list[int]]:
        return [list(range(tokens // group.block_size)) for group in self.groups]

    def blocks(self, group: int) -> torch.Tensor:
        return as_bytes(_content(self.groups[group], self.kv, f"g{group}."))


def _content(group: Group, kv: Mapping[str, object], prefix: str) -> torch.Tensor:
    """`[layer, plane, block, slot, head, dim]` back from an engine's tensors, by their axes and not by the plugin."""
    layers = []
    for name, held in kv.items():
        if name.startswith(prefix):
            tensor, names = held, list(group.axes)
            assert isinstance(tensor, torch.Tensor)
            for axis in ("plane", "token", "head"):
                if axis not in names:
                    tensor = tensor.unsqueeze(0)
                    names.insert(0, axis)
            layers.append(tensor.permute([names.index(axis) for axis in ("plane", "block", "token", "head", "dim")]))
    return torch.stack(layers)


@pytest.mark.parametrize("path", ["arena", "wire"])
def test_a_hit_needs_of_each_group_what_its_attention_needs(client: KVClient, path: str) -> None:
    engine = Engine(client, 1, HYBRID, 1024, seed=7, path=path)
    tokens = list(range(1024))
    request = engine.request(tokens)
    # The engine has freed what is out of the window, and keeps the state of its last block only.
    ids = engine.ids(1024)
    ids[1] = [NO_BLOCK] * 20 + ids[1][20:]  # held: tokens 640 to 1024, so chunks 3 whole and 2 in part
    ids[2] = [NO_BLOCK] * 15 + ids[2][15:]
    future = engine.worker.submit_store(request, 0, 1024, ids)
    assert future.result(30).stored == 4 + 1 + 1 + 4
    assert engine.hit(request) == 0, "the window of 300 reaches into chunk 2, which was not whole"
    again = engine.ids(1024)
    again[1] = [NO_BLOCK] * 16 + again[1][16:]
    again[2] = [NO_BLOCK] * 15 + again[2][15:]
    future = engine.worker.submit_store(request, 0, 1024, again)
    assert (future.result(30).ok, future.result().stored) == (True, 1)
    assert engine.hit(request) == 1024
    assert [engine.hit(request, end) for end in (256, 512, 768)] == [0, 0, 0], "no state at these ends"

    other = Engine(client, 2, HYBRID, 1024, path=path)
    wanted = other.ids(1024)
    # Only the window's blocks and the state's need be valid; the others may say anything.
    wanted[1] = [NO_BLOCK, 10**6, *[0] * 20, *wanted[1][22:]]
    wanted[2] = [12345] * 15 + wanted[2][15:]
    assert other.worker.submit_retrieve(other.request(tokens, "q"), 0, 1024, wanted).result(30).ok
    got, want = [other.blocks(group) for group in range(4)], [engine.blocks(group) for group in range(4)]
    assert torch.equal(got[0][:, :, :64], want[0][:, :, :64])
    assert torch.equal(got[1][:, :, 22:32], want[1][:, :, 22:32])
    assert not got[1][:, :, :22].any(), "blocks out of the window are not touched"
    assert torch.equal(got[2][:, :, 15], want[2][:, :, 15])
    assert not got[2][:, :, :15].any()
    assert torch.equal(got[3][:, :, :16], want[3][:, :, :16])


def test_a_failed_load_names_only_blocks_that_it_would_have_written(client: KVClient) -> None:
    engine = Engine(client, 1, HYBRID, 512)
    ids = engine.ids(512)
    ids[1] = [NO_BLOCK] * 6 + ids[1][6:]
    ids[2] = [10**6] * 7 + ids[2][7:]
    assert not engine.worker.submit_retrieve(engine.request(list(range(512))), 0, 512, ids).result(30).ok
    assert engine.worker.get_finished() == (set(), {"r"})
    assert engine.worker.take_failed_blocks() == [set(range(32)), set(range(6, 16)), {7}, set(range(8))]


def test_what_has_left_every_window_may_be_evicted_and_the_hit_stays(server: ServerProcess, client: KVClient) -> None:
    big = Group(FULL.axes, layers=4, heads=4, dim=16, block_size=16)  # 512 KiB an object
    groups = (big, Group(WINDOW.axes, layers=4, heads=4, dim=16, block_size=32, window=256))
    engine = Engine(client, 1, groups, 1024, seed=9)
    request = engine.request(list(range(1024)))
    future = engine.worker.submit_store(request, 0, 1024, engine.ids(1024))
    assert (future.result(30).ok, future.result().stored) == (True, 8)
    assert [engine.hit(request, end) for end in (256, 512, 768, 1024)] == [256, 512, 768, 1024]
    # L1 holds 16 objects. The hit of 1024 keeps using 4 + 1 of them; others push out the oldest of the rest.
    for number in range(3):
        assert engine.hit(request) == 1024
        filler = engine.request([number + 5000] * 512, f"filler{number}")
        assert engine.worker.submit_store(filler, 0, 512, engine.ids(512)).result(30)
    with server.client() as watcher:
        assert watcher.status()["l1"]["evictions"] >= 2
    assert engine.hit(request) == 1024
    assert engine.hit(request, 512) == 0, "the window's first chunks are gone"
    other = Engine(client, 2, groups, 1024)
    assert other.worker.submit_retrieve(other.request(list(range(1024)), "q"), 0, 1024, other.ids(1024)).result(30)
    assert torch.equal(other.blocks(0)[:, :, :64], engine.blocks(0)[:, :, :64])
    assert torch.equal(other.blocks(1)[:, :, 24:32], engine.blocks(1)[:, :, 24:32])


def test_full_attention_may_leave_out_nothing(client: KVClient) -> None:
    engine = Engine(client, 1, HYBRID, 512, seed=3)
    request = engine.request(list(range(512)))
    ids = engine.ids(512)
    ids[0][0] = NO_BLOCK
    with pytest.raises(ValueError, match=str(NO_BLOCK)):
        engine.worker.submit_store(request, 0, 512, ids)
    key = engine.worker.key(request, 0, 512)
    for first in ([1, 0, 0, 0], [0, 3, 0, 0], [0, -1, 0, 0], [0, 0]):
        with pytest.raises(BadRange, match="first_chunks"):
            client.request("PREPARE_STORE", Prepare(key, 1, tuple(first)), StorePlan)
    assert client.request("PREPARE_STORE", Prepare(key, 1, (0, 2, 2, 0)), StorePlan).outcome.dropped == 0


class PackedView(EngineView):
    """How an engine sees its packed blocks `[blocks, 2, 16, 8]`: as bytes; `shift` makes it see another order."""

    spare_blocks = (32,)

    def __init__(self, kv: dict[str, torch.Tensor], shift: int = 0) -> None:
        self._layers, self._shift = list(kv.values()), shift

    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        raw = self._layers[layer][block].clone().view(torch.uint8).view(1, 1, -1)
        return raw.roll(self._shift, -1)

    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        raw = values.roll(-self._shift, -1).view(-1).view(torch.float32)
        self._layers[layer][block] = raw.view(self._layers[layer][block].shape)


def test_the_canary_proves_opaque_blocks_too(client: KVClient) -> None:
    kv = {f"l{i}": torch.randn(33, 2, 16, 8) for i in range(2)}
    worker = WorkerAdapter(
        client, instance_id=1, model_name="m", layout="opaque", layout_options={"packing": "amx", "block_axis": 0}
    )
    with pytest.raises(BadLayout, match="the declared layout differs from the engine's:"):
        worker.register_kv_caches(kv, block_size=16, view=PackedView(kv, shift=4))
    worker.register_kv_caches(kv, block_size=16, view=PackedView(kv))
