"""Engines of one namespace that hold their layers in another order never read each other's, at a real server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvframework.client import KVClient, RequestHashes, SchedulerAdapter
from kvframework.errors import NamespaceMismatch
from tests.core.tiers.nodes import await_written
from tests.support.engines import PagedEngine
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess, client_fixture, server_fixture
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch


TOKENS = list(range(256))
AXES = ["plane", "block", "token", "head", "dim"]


class Engine(PagedEngine):
    """Each layer's memory is filled with the number in its name. Groups are alike in all but their layers."""

    def __init__(
        self, client: KVClient, instance_id: int, groups: Sequence[Sequence[str]], *, rank: int = 0, world_size: int = 1
    ) -> None:
        kv = {name: torch.zeros((2, 16, 16, 1, 4)) for group in groups for name in group}
        rules = {"groups": [{"layers": list(group), "axes": AXES, "block_size": 16} for group in groups]}
        split = {"rank": rank, "world_size": world_size}
        super().__init__(client, instance_id, kv=kv, layout="paged", layout_options=rules, **split)
        self.asked = self.request(TOKENS)
        self.ids = [list(range(16))] * len(groups)

    def store(self) -> None:
        for name, memory in self.kv.items():
            memory.fill_(_number(name))
        assert self.worker.submit_store(self.asked, 0, 256, self.ids).result(0)

    def hit(self) -> int:
        return super().hit(self.asked)

    def load(self) -> bool:
        """Whether all layers hold what is theirs afterwards; fails for another's."""
        for memory in self.kv.values():
            memory.fill_(-1.0)
        loaded = self.worker.submit_retrieve(self.asked, 0, 256, self.ids).result(0).ok
        for name, memory in self.kv.items():
            assert memory.eq(_number(name) if loaded else -1.0).all(), f"another layer's KV in {name}"
        return loaded


def _number(name: str) -> float:
    return float(name.split(".")[-1])


def layers(*numbers: int, form: str = "layers.{}") -> list[str]:
    return [form.format(number) for number in numbers]


process = server_fixture(capacity="8MiB", scope="module")


@pytest.fixture
def server(process: ServerProcess) -> ServerProcess:
    return process.emptied()


client = client_fixture(engine=True)


@pytest.mark.parametrize(
    ("groups", "others"),
    [
        ([layers(0, 1, 2, 3)], [layers(0, 2, 1, 3)]),
        ([layers(0, 1), layers(2, 3)], [layers(0, 2), layers(1, 3)]),
        ([layers(2, 3), layers(0, 1)], [layers(0, 1), layers(2, 3)]),
        ([layers(0, 1)], [layers(1, 0, form="h.{}")]),
    ],
    ids=["order", "membership", "groups", "other names"],
)
def test_another_order_is_refused_and_once_it_is_alone_finds_nothing(
    client: KVClient, groups: list[list[str]], others: list[list[str]]
) -> None:
    first = Engine(client, 1, groups)
    first.store()
    assert first.hit() == 256
    assert first.load()
    with pytest.raises(NamespaceMismatch, match="in another order"):
        Engine(client, 2, others)
    first.worker.close()
    other = Engine(client, 2, others)
    assert other.registration.namespace == first.registration.namespace
    assert other.hit() == 0
    assert not other.load()
    other.store()
    assert other.load()
    other.worker.close()
    again = Engine(client, 1, groups)
    assert again.hit() == 256, "what it had stored is still there"
    assert again.load()


def test_names_of_another_kind_in_the_same_order_share(client: KVClient) -> None:
    groups = [layers(0, 2, 4), layers(1, 3, 5)]
    first = Engine(client, 1, groups)
    first.store()
    other = Engine(client, 2, [[f"model.{name}" for name in group] for group in groups])
    assert other.hit() == 256
    assert other.load()


def test_ranks_hold_layers_of_their_own(client: KVClient) -> None:
    """As pipeline-parallel ranks do, also where the pattern of groups does not fit the number of layers."""
    ranks = [
        Engine(client, rank, [layers(*full), layers(*windowed)], rank=rank, world_size=2)
        for rank, (full, windowed) in enumerate([((0, 2), (1, 3)), ((5, 7), (4, 6))])
    ]
    assert ranks[0].registration.namespace == ranks[1].registration.namespace
    ranks[0].store()
    assert ranks[0].hit() == 0, "the other rank has stored nothing"
    ranks[1].store()
    assert ranks[0].hit() == 256
    assert all(rank.load() for rank in ranks)


def test_servers_that_share_l2_keep_orders_apart(tmp_path: Path) -> None:
    """Another order finds nothing; the same order finds it all, also before its worker has registered there."""
    l2 = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB", "l2.0.shared=true")
    groups, others = [layers(0, 2), layers(1, 3)], [layers(0, 1), layers(2, 3)]
    with ServerProcess(*l2, capacity="8MiB") as here, here.engine_client() as client:
        first = Engine(client, 1, groups)
        first.store()
        with here.client() as watcher:
            await_written(watcher)
    for order, hit in ((others, 0), (groups, 256)):
        with ServerProcess(*l2, capacity="8MiB") as there, there.engine_client() as client:
            scheduler = SchedulerAdapter(
                client, model_name="m", namespace=first.registration.namespace, chunk_tokens=256
            )
            request = RequestHashes(client.hasher, 256, request_id="r")
            request.extend(TOKENS)
            wait_until(lambda: scheduler.wait(scheduler.lookup(request), 20.0).hit_tokens == 256, what="the record")  # noqa: B023
            engine = Engine(client, 1, order)
            assert engine.hit() == hit, "what came before it registered is not its own"
            assert engine.load() == bool(hit)
            with there.client() as watcher:
                (tier,) = watcher.status()["l2"]
                assert tier["corrupt"] == 0, "nothing of the others' is deleted"
