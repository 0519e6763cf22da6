"""The linker with a fault: what it loads is changed before SGLang uses it."""

from __future__ import annotations

from typing import Any

from kvf_sglang.linker import KvFrameworkLinker


class SpoiledPages(KvFrameworkLinker):
    def load(self, rid: str, transfers: list[Any]) -> bool:
        loaded = super().load(rid, transfers)
        for buffer in next(iter(self.pools.values())).k_buffer:
            buffer.neg_()
        return loaded


class SpoiledStates(KvFrameworkLinker):
    def load(self, rid: str, transfers: list[Any]) -> bool:
        loaded = super().load(rid, transfers)
        states = next(pool for name, pool in self.pools.items() if name.value == "mamba").mamba_cache
        for buffer in (states.temporal, *states.conv):
            buffer.neg_()
        return loaded
