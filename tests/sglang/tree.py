"""SGLang's real radix tree, cache controller, pools and threads in this process, without a model and an engine."""

from __future__ import annotations

import json
import tempfile
from array import array
from pathlib import Path
from typing import Any

import torch

from tests.sglang.engine_order import storage_of
from tests.sglang.standins import everything

everything.install()

PAGE, LAYERS, HEADS, DIM = 16, 2, 2, 8


class Tree:
    """A tree with its device pool, whose host pool is behind the server. One at a time in a process."""

    def __init__(
        self, endpoint: str, model: Path, *, layout: str = "layer_first", tokens: int = 512, **options: Any
    ) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.runtime_context import get_context, get_parallel
        from sglang.srt.server_args import ServerArgs

        if not torch.distributed.is_initialized():
            store = torch.distributed.FileStore(tempfile.mkstemp()[1], 1)
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        args = ServerArgs(
            model_path=str(model),
            load_format="dummy",
            device="cpu",
            dtype="float32",
            page_size=PAGE,
            skip_tokenizer_init=True,
            attention_backend="torch_native",
            sampling_backend="pytorch",
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_io_backend="direct",
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(storage_of(endpoint, prefetch_threshold=PAGE, **options)),
        )
        get_context().set_server_args(args)
        get_parallel().override_permanently(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_tp_rank=0, attn_cp_rank=0, attn_cp_size=1, attn_dcp_rank=0
        )
        self.pool = MHATokenToKVPool(
            size=tokens,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            size=tokens, page_size=PAGE, dtype=torch.float32, device="cpu", kvcache=self.pool, need_sort=False
        )
        group = torch.distributed.group.WORLD
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, tokens, "cpu", False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tp_cache_group=group,
            tree_components=(ComponentType.FULL,),
        )
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(args, params)

    def close(self) -> None:
        self.cache.shutdown()

    @property
    def backend(self) -> Any:
        return self.cache.cache_controller.storage_backend

    def key(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens), extra_key=None)

    def step(self) -> None:
        self.cache.check_hicache_events()

    def insert(self, tokens: list[int]) -> Any:
        """Computed tokens: their places in the device pool."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        places = self.allocator.alloc(len(tokens))
        for layer in range(LAYERS):
            for plane in (self.pool.k_buffer, self.pool.v_buffer):
                plane[layer][places] = torch.randn(len(tokens), HEADS, DIM)
        self.cache.insert(InsertParams(key=self.key(tokens), value=places))
        return places

    def content(self, places: Any) -> Any:
        """`[planes, layers, tokens, heads, dim]`."""
        planes = (self.pool.k_buffer, self.pool.v_buffer)
        return torch.stack([torch.stack([layer[places] for layer in plane]) for plane in planes])

    def match(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))

    def prefetch(self, tokens: list[int], request: str) -> Any:
        """Asks the storage for what the tree lacks, as for a request that is queued; its handle."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        handle = CacheRequestHandle(request, 0)
        found = self.match(tokens)
        self.cache.prefetch_from_storage(handle, found.last_host_node, array("q", tokens))
        return handle

    def load_back(self, tokens: list[int]) -> Any:
        """Brings what the host has to the device; the places of all that is there."""
        found = self.match(tokens)
        self.cache.load_back(found.best_match_node, None, req=None)
        self.cache.ready_to_load_host_cache()
        root, node = (self.match(each).last_device_node for each in ([], tokens))
        return self.cache.tree_core.collect_full_device_indices(node, root)
