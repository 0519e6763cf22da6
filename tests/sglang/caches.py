"""One worker's cache over host pools shaped as SGLang's, before a real server, for tests without SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvf_sglang.cache import KV, PageCache, Worker
from kvf_sglang.options import SglangOptions
from kvframework.client import KvIdentity
from tests.sglang import pools
from tests.sglang.pools import Transfer, content
from tests.support.lazy import torch
from tests.support.waiting import wait_until

MODEL = KvIdentity("model", "revision")
MAMBA = Transfer("mamba", "trailing_pages", ["placeholder"])


class Engine:
    """One worker's cache with its pools."""

    def __init__(
        self,
        endpoint: str,
        *host_pools: Any,
        worker: Worker = Worker(),  # noqa: B008 - immutable
        identity: KvIdentity | Callable[[], KvIdentity] = MODEL,
        attached: bool = True,
        release: str = "",
        **options: Any,
    ) -> None:
        named = identity if callable(identity) else lambda: identity
        given = {"lookup_deadline_s": 10.0, "load_deadline_s": 10.0, "store_deadline_s": 10.0, "deadline_scale": 20.0}
        self.cache = PageCache(SglangOptions(endpoint=endpoint, **{**given, **options}), worker, named, release=release)
        self.pools = dict(zip((KV, "mamba"), host_pools, strict=False))
        for name, pool in self.pools.items():
            self.cache.add_pool(name, pool)
        if attached:
            wait_until(lambda: all(self.cache._of(name) for name in self.pools), what="the registration")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.cache.close()

    @property
    def pool(self) -> Any:
        return self.pools[KV]

    def store(self, names: list[str], first: int = 0) -> list[bool]:
        places = list(range(first, first + len(names)))
        for place, key in zip(places, names, strict=True):
            self.pool.page(place).copy_(content(self.pool.page(place), key))
        return self.cache.store(KV, names, self.pool.indices(places))

    def load(self, names: list[str], first: int = 0) -> list[bool]:
        """Loads, and proves every byte of what is said to be there."""
        places = list(range(first, first + len(names)))
        self.pool.kv_buffer.zero_()
        loaded = self.cache.load(KV, names, self.pool.indices(places))
        for place, key, there in zip(places, names, loaded, strict=True):
            if there:
                assert torch.equal(self.pool.page(place), content(self.pool.page(place), key))
        untouched = set(range(pools.PAGES)) - set(places)
        assert not any(bool(self.pool.page(page).any()) for page in untouched)
        return loaded

    def store_state(self, key: str, slot: int) -> list[bool]:
        for index, part in enumerate(self.pools["mamba"].parts(slot)):
            part.copy_(content(part, key, index))
        return self.cache.store("mamba", [key], [slot])
