"""The registration of SGLang's host pools with the server: as soon as a server runs, and again after its restarts.

Engine side. A thread of its own names the model's weights, waits for the server and registers each pool; SGLang's
threads never wait for it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvf_sglang.options import SglangOptions
from kvf_sglang.pools import PoolForm
from kvframework.api.logs import LogLimit
from kvframework.client import KVClient, KvIdentity, ModelPart, SchedulerAdapter, WorkerAdapter
from kvframework.errors import KVFrameworkError, ServerGone

log = logging.getLogger(__name__)

RETRY_S = 5.0
_UP_S = 0.5
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


@dataclass
class AttachedPool:
    """One registered pool. SGLang loads and stores in two threads at once, and an adapter belongs to one: so there are
    two."""

    form: PoolForm
    page_tokens: int
    loads: WorkerAdapter
    stores: WorkerAdapter
    lookups: SchedulerAdapter
    groups: int
    world_size: int
    page_bytes: int
    loading: threading.Lock = field(default_factory=threading.Lock)
    storing: threading.Lock = field(default_factory=threading.Lock)


class Attachments:
    """The pools of one engine process, by name. `identity` names the model; it may read files, and raise. `release` is
    part of the names if it is not ""."""

    def __init__(
        self,
        client: KVClient,
        options: SglangOptions,
        identity: Callable[[], KvIdentity],
        *,
        release: str = "",
        retry_s: float = RETRY_S,
    ) -> None:
        self._client = client
        self._options = options
        self._identity = identity
        self._release = "release:" + release if release else ""
        self._retry_s = retry_s
        self._named: KvIdentity | None = None
        self._attached: dict[str, AttachedPool] = {}
        self._waiting: dict[str, tuple[PoolForm, int, Place]] = {}
        self._once = LogLimit.once()
        self._lock = threading.Lock()
        self._registering = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def get(self, name: str) -> AttachedPool | None:
        """The pool, None as long as it is not registered. Never blocks."""
        return self._attached.get(name)

    def add(self, name: str, form: PoolForm, page_tokens: int, place: Place) -> None:
        """Registers a pool in the background; its memory is borrowed until `close`. A name that is known stays what it
        is. Never blocks."""
        with self._lock:
            if name in self._attached or name in self._waiting or self._closed.is_set():
                return
            self._waiting[name] = form, page_tokens, place
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="kvf-sglang-attach", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Unregisters, if the server runs; waits for a registration that is under way, not for files that are read. No
        transfer may be in progress. Idempotent."""
        with self._lock:
            self._closed.set()
        if self._registering.acquire(timeout=2 * self._client.deadlines.setup_s + _UP_S):
            self._registering.release()
        attached, self._attached = self._attached, {}
        for pool in attached.values():
            pool.loads.close()
            pool.stores.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                name, waiting = next(iter(self._waiting.items()), ("", None))
                if waiting is None:
                    self._thread = None
                    return
            try:
                if self._named is None:
                    self._named = self._identity()
                with self._registering:
                    if self._closed.is_set():
                        return
                    self._attached[name] = self._registered(name, self._named, *waiting)
            except Exception as error:  # noqa: BLE001 - not even a broken plugin may harm the engine
                self._log(name, error)
                with self._lock:  # another pool may have more luck
                    self._waiting[name] = self._waiting.pop(name)
                if not isinstance(error, ServerGone):
                    self._closed.wait(self._retry_s)
                continue
            with self._lock:
                del self._waiting[name]

    def _registered(
        self, name: str, identity: KvIdentity, form: PoolForm, page_tokens: int, place: Place
    ) -> AttachedPool:
        if not self._client.wait_up(_UP_S):
            self._client.raise_down()
        loads, stores = [self._adapter(name, form, place, identity) for _ in range(2)]
        try:
            registration = loads.register_kv_caches(form.tensors, block_size=page_tokens)
            stores.register_kv_caches(form.tensors, block_size=page_tokens)
            lookups = loads.scheduler()
        except BaseException:
            loads.close()
            stores.close()
            raise
        log.info(
            "pool %s registered with the server at %s: pages of %d tokens, %.1f KiB a page, namespace %s",
            name,
            self._client.endpoint,
            page_tokens,
            registration.desc.nbytes / 1024,
            registration.namespace.hex(),
        )
        return AttachedPool(
            form,
            page_tokens,
            loads,
            stores,
            lookups,
            groups=len(registration.layout.groups),
            world_size=registration.world_size,
            page_bytes=registration.desc.nbytes,
        )

    def _adapter(self, name: str, form: PoolForm, place: Place, identity: KvIdentity) -> WorkerAdapter:
        # What names KV beside the model; nothing where the names are those of other engines.
        foreign = self._client.hello.hasher_fingerprint != PAGE_HASHER
        pool = "" if name == "kv" else "pool:" + name
        parts = ["pages:" + PAGE_HASHER if foreign else "", pool, form.packing, place.stage, self._release]
        return WorkerAdapter(
            self._client,
            instance_id=secrets.randbits(62),
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

    def _log(self, name: str, error: Exception) -> None:
        """One line for each reason, with a traceback for an error that is not the framework's own."""
        if self._once.passes((name, str(error))):
            known = isinstance(error, KVFrameworkError)
            log.warning(
                "pool %s is not cached until there is a server that accepts it: %s",
                name,
                error,
                exc_info=None if known else error,
            )
