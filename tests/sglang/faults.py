"""The backend with a fault: what it loads is changed before SGLang uses it. The control of every proof: tokens must
differ then."""

from __future__ import annotations

from typing import Any

from kvf_sglang.storage import KvFrameworkStorage


class SpoiledPages(KvFrameworkStorage):
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        loaded = super().batch_get_v1(keys, host_indices, extra_info)
        self.mem_pool_host.kv_buffer.neg_()
        return loaded


class SpoiledStates(KvFrameworkStorage):
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self.pools = {**getattr(self, "pools", {}), str(host_pool_name.value): host_pool}

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        loaded = super().batch_get_v2(transfers, extra_info)
        for buffer in (self.pools["mamba"].temporal_buffer, *self.pools["mamba"].conv_buffer):
            buffer.neg_()
        return loaded
