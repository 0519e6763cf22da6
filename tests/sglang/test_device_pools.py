"""Device pools against a real server: what a linker stores the hierarchical cache loads, and the other way round; and
the parts of a linker by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvf_sglang.cache import KV
from kvf_sglang.pools import device_form_of
from kvf_sglang.waiting import HIT_HOLDS_S, MISS_HOLDS_S, MOST_REQUESTS, MOST_WAITING, Offloads, RecentLookups
from kvframework.errors import BadLayout
from tests.sglang import pools
from tests.sglang.caches import MAMBA, Engine
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch


class Linked(Engine):
    """One worker's cache with its device pools."""

    def __init__(self, endpoint: str, kv: Any, mamba: Any) -> None:
        super().__init__(endpoint)
        self.pools = {KV: kv, "mamba": mamba}
        for name, pool in self.pools.items():
            self.cache.add_pool(name, pool, device_form_of)
        wait_until(lambda: all(map(self.cache.attached, self.pools)), what="the registration")


def test_objects_of_device_pools_are_those_of_host_pools(server: ServerProcess) -> None:
    names, more = pools.keys(4), pools.keys(4, seed="more")
    with Linked(server.endpoint, pools.MHATokenToKVPool(), pools.MambaPool()) as linked:
        for page, key in enumerate(names, start=1):
            linked.pool.fill(page, key)
        assert linked.cache.store(KV, names, linked.pool.indices([1, 2, 3, 4])) == [True] * 4
        assert linked.store_state(names[2], 3) == [True]
        with Engine(server.endpoint, pools.MHATokenToKVPoolHost(), pools.MambaPoolHost(beside=False)) as hosted:
            assert hosted.cache.find(names, [MAMBA]) == (3, {KV: 4, "mamba": 3}, [3])
            assert hosted.load(names) == [True] * 4
            assert hosted.cache.load("mamba", [names[2]], [0]) == [True]
            for index, part in enumerate(hosted.pools["mamba"].parts(0)):
                assert torch.equal(part, pools.content(part, names[2], index))
            assert hosted.store(more) == [True] * 4
            assert hosted.store_state(more[3], 7) == [True]
        assert linked.cache.find(more, [MAMBA], 10.0).restorable == [4]
        assert linked.cache.load(KV, more, linked.pool.indices([5, 6, 9, 8])) == [True] * 4
        for page, key in zip([5, 6, 9, 8], more, strict=True):
            assert torch.equal(linked.pool.page(page), pools.content(linked.pool.page(page), key))
        assert not linked.pool.page(7).any()
        assert linked.cache.load("mamba", [more[3]], [1]) == [True]
        for index, part in enumerate(linked.pools["mamba"].parts(1)):
            assert torch.equal(part, pools.content(part, more[3], index))
        assert not linked.pools["mamba"].mamba_cache.temporal[:, 2].any()


def turned_states() -> pools.MambaPool:
    pool = pools.MambaPool()
    pool.mamba_cache.conv = [pools.turned(slots_first=False)]
    return pool


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (type("UnifiedMHAPool", (pools.MHATokenToKVPool,), {}), "its kind"),
        (type("MHATokenToKVPool", (pools.MHATokenToKVPool,), {"kv_cache_layout": "hnd"}), "layout is 'hnd'"),
        (type("MLATokenToKVPool", (pools.MLATokenToKVPool,), {"page_size": 16}), "pages have 16 tokens"),
        (type("MambaPool", (pools.MambaPool,), {"_slot_siblings": (SimpleNamespace(),)}), "further tensors"),
        (turned_states, "are not laid out in the order"),
    ],
)
def test_a_device_pool_that_is_not_known_to_convert_is_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(BadLayout, match=why):
        device_form_of(make(), pools.PAGE)


def test_a_latent_pool_has_one_plane() -> None:
    form = device_form_of(pools.MLATokenToKVPool(), pools.PAGE)
    assert (form.per_head, form.slots, len(form.tensors)) == (False, pools.PAGE, 3)


def test_offloads_end_in_their_order() -> None:
    offloads, go_on = Offloads(), threading.Event()

    def fails() -> bool:
        raise OSError("no")

    def waits() -> bool:
        return go_on.wait(60)

    assert offloads.pop() is False
    assert all(offloads.submit(each) for each in (lambda: False, fails, lambda: True, waits))
    wait_until(lambda: offloads.ended == 3, what="three")
    assert [offloads.pop() for _ in range(3)] == [False, False, True]
    waiting = [offloads.submit(lambda: True) for _ in range(MOST_WAITING + 1)]
    assert waiting == [True] * MOST_WAITING + [False]
    go_on.set()
    offloads.quiesce()
    assert offloads.ended == 0
    assert offloads.submit(lambda: True)
    offloads.close()
    offloads.close()
    assert offloads.pop() is True


def test_what_was_found_lately_is_not_asked_again() -> None:
    now, asked = 0.0, []
    recent = RecentLookups(lambda: now)

    def ask(answer: list[int]) -> Callable[[], list[int]]:
        def answered() -> list[int]:
            asked.append(answer)
            return answer

        return answered

    assert recent.get("r", ["a", "b"], ask([2])) == recent.get("r", ["a", "b"], ask([3])) == [2]
    assert recent.get("r", ["a", "b", "c"], ask([3])) == [3]
    assert recent.get("other", ["a"], ask([])) == []
    now = MISS_HOLDS_S
    assert recent.get("other", ["a"], ask([1])) == [1]
    assert recent.get("r", ["a", "b", "c"], ask([])) == [3]
    now = HIT_HOLDS_S
    assert recent.get("r", ["a", "b", "c"], ask([])) == []
    recent.forget("r")
    assert recent.get("r", ["a", "b", "c"], ask([3])) == [3]
    assert asked == [[2], [3], [], [1], [], [3]]
    for number in range(MOST_REQUESTS):
        recent.get(f"r{number}", ["a"], ask([1]))
    assert recent.get("r", ["a", "b", "c"], ask([1])) == [1]
