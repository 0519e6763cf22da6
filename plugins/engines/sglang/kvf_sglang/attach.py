"""The registration of SGLang's host pools with the server, in the background (`Attachment`): SGLang's threads wait
neither for it nor for the naming of the model's weights. After a restart of the server the adapters register again by
themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvf_sglang.options import SglangOptions
from kvf_sglang.pages import PoolPages, Salt
from kvf_sglang.pools import PoolForm
from kvframework.client import Attachment, KVClient, KvIdentity, ModelPart, WorkerAdapter

# SGLang's own page hashes are the digests. A server with this hasher serves other engines under the same names.
PAGE_HASHER = "sglang/1"


@dataclass(frozen=True)
class Place:
    """The place of a worker among those that hold parts of the same KV: `stage` names its layers, "" for all; `part` is
    what it holds of them, None if that is not known."""

    rank: int = 0
    world_size: int = 1
    stage: str = ""
    part: ModelPart | None = None


class Attachments:
    """The pools of one engine process, by name. `identity` names the model; it may read files, and raise. `release` is
    part of the names if it is not ""."""

    def __init__(
        self,
        client: KVClient,
        options: SglangOptions,
        identity: Callable[[], KvIdentity],
        salt: Salt,
        *,
        release: str = "",
        clock: Callable[[], float],
    ) -> None:
        self._client, self._salt, self._clock = client, salt, clock
        self._options = options
        self._identity = identity
        self._release = "release:" + release if release else ""
        self._named: KvIdentity | None = None
        self._naming = threading.Lock()
        self._pools: dict[str, Attachment[PoolPages]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def get(self, name: str) -> PoolPages | None:
        """The pool, None as long as it is not registered. Never blocks."""
        pool = self._pools.get(name)
        return pool.value if pool is not None else None

    def add(self, name: str, form: PoolForm, page_tokens: int, place: Place) -> None:
        """Register a pool in the background; its memory is borrowed until `close`. A name that is known stays what it
        is. Never blocks."""
        with self._lock:
            if name in self._pools or self._closed:
                return
            self._pools[name] = Attachment(
                self._client,
                lambda: self._registered(name, form, page_tokens, place),
                missing=f"pool {name} is not cached until a server accepts it",
            )
            self._pools[name].begin_in_background(self._name)

    def close(self) -> None:
        """Unregister, if the server runs; wait for a registration that is under way, not for files that are read. No
        transfer may be in progress. Idempotent."""
        with self._lock:
            self._closed = True
        for each in self._pools.values():
            pool = each.stop(2 * self._client.deadlines.setup_s + 0.5)
            if pool is not None:
                pool.close()

    def _name(self, stop: threading.Event) -> None:
        with self._naming:
            if self._named is None and not stop.is_set():
                self._named = self._identity()

    def _registered(self, name: str, form: PoolForm, page_tokens: int, place: Place) -> PoolPages:
        assert self._named is not None
        loads, stores = [self._adapter(name, form, place, self._named) for _ in range(2)]
        try:
            registration = loads.register_kv_caches(form.tensors, block_size=page_tokens)
            stores.register_kv_caches(form.tensors, block_size=page_tokens)
            return PoolPages(self._client, form, registration, loads, stores, self._salt, clock=self._clock)
        except BaseException:
            loads.close()
            stores.close()
            raise

    def _adapter(self, name: str, form: PoolForm, place: Place, identity: KvIdentity) -> WorkerAdapter:
        # What names KV beside the model; nothing where the names are those of other engines.
        foreign = self._client.hello.hasher_fingerprint != PAGE_HASHER
        pool = "" if name == "kv" else "pool:" + name
        parts = ["pages:" + PAGE_HASHER if foreign else "", pool, form.packing, place.stage, self._release]
        return WorkerAdapter(
            self._client,
            model_name=identity.model_name,
            world_size=place.world_size,
            rank=place.rank,
            transport=self._options.transport,
            transport_options=self._options.transport_options,
            layout="paged",
            layout_options=form.options,
            revision=identity.revision,
            quantization=identity.quantization,
            model_dtype=identity.dtype,
            packing="+".join(filter(None, parts)),
            part=place.part,
        )
