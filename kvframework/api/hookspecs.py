"""The hook specifications. Hooks run once, at startup; the descriptors that they return make the plain objects of the
hot path.

Every hook takes no argument, is collect-all and returns a list of provider descriptors. A plugin is a module (or
object) with hook implementations, named by entry points of the group `kvframework.v1`: one entry point per provider,
called `<kind>.<name>`, for example in a plugin's pyproject.toml:

    [project.entry-points."kvframework.v1"]
    "tier.mystore" = "kvf_mystore"
"""

from __future__ import annotations

import pluggy

from kvframework.api.codec import CodecProvider
from kvframework.api.driver import DeviceTransportProvider
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.listener import ListenerProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import PROJECT
from kvframework.api.requests import RequestsProvider
from kvframework.api.tier import TierProvider
from kvframework.api.transport import TransportProvider

_hookspec = pluggy.HookspecMarker(PROJECT)


@_hookspec
def kvf_transports() -> list[TransportProvider | DeviceTransportProvider]:  # type: ignore[type-arg,empty-body]
    """Transports: how bytes move between engine memory and the server. An accelerator's is a `DeviceTransportProvider`.

    Example, an engine-driven transport named `copy` (entry point `transport.copy`):

        from kvframework.api.transport import TransferContext, TransportProvider, hookimpl
        from kvframework.errors import TransportMismatch

        class CopyContext(TransferContext):
            def __init__(self, link):
                self._link = link

            def on_registered(self, registration, layout):
                if not self._link.maps_arena:
                    raise TransportMismatch("copy works in the server's arena, which is not mapped here")

            def store(self, transfer):
                # What this raises is a miss for the engine. The block aborts what is not committed.
                with self._link.prepare_store(transfer).result() as plan:
                    for place in plan.ranges:
                        # Here the bytes move: gather the blocks transfer.blocks_of(place) of transfer.kv_caches.
                        plan.arena[place.offset : place.offset + place.length] = bytes(place.length)
                    return plan.commit()

            def load(self, transfer, skip_tokens):
                with self._link.prepare_load(transfer).result() as plan:  # a miss has no ranges
                    for place in plan.ranges:
                        # Here they move back, but for NO_BLOCK and the first skip_tokens tokens.
                        plan.arena[place.offset : place.offset + place.length]
                    return plan.commit()

            def close(self):
                pass

        @hookimpl
        def kvf_transports():
            return [TransportProvider(name="copy", summary="copies", create=lambda options, link: CopyContext(link))]
    """


@_hookspec
def kvf_layouts() -> list[LayoutProvider]:  # type: ignore[type-arg,empty-body]
    """Layouts: how an engine's tensors hold KV, and what one stored object looks like.

    Example, tensors `[blocks, tokens, heads, dim]`, one for K and one for V (entry point `layout.pair`):

        from kvframework.api.layout import KVLayout, LayerGroup, Layout, LayoutProvider, hookimpl

        class PairLayout(Layout):
            name = "pair"

            def describe(self, kv_caches, *, block_size):
                keys, values = next(iter(kv_caches.values()))
                blocks, tokens, heads, dim = keys.shape
                group = LayerGroup(len(kv_caches), block_size, heads, dim, str(keys.dtype).removeprefix("torch."),
                                   axes=("block", "token", "head", "dim"))
                return KVLayout("pair", (group,), blocks)

            def block_views(self, layout, kv_caches):
                return [[[pair[plane] for pair in kv_caches.values()] for plane in (0, 1)]]

        @hookimpl
        def kvf_layouts():
            return [LayoutProvider(name="pair", summary="K and V apart", create=lambda options: PairLayout())]
    """


@_hookspec
def kvf_memories() -> list[MemoryProvider]:  # type: ignore[type-arg,empty-body]
    """The memory of L1: the shared arena in which all objects lie.

    Example, a segment without a name (entry point `memory.shared`):

        import mmap
        import os
        import threading
        from kvframework.api.memory import ArenaError, Memory, MemoryProvider, hookimpl
        from kvframework.api.plugin import ByteSize, Options

        STEP = 16 << 20

        class SharedOptions(Options, frozen=True):
            capacity: ByteSize = ByteSize(1 << 30)

        class SharedMemory(Memory):
            def __init__(self, capacity):
                self.capacity = capacity
                self._stop = threading.Event()
                self._thread = None
                self.fd = os.memfd_create("kvf-shared")
                try:
                    os.ftruncate(self.fd, capacity)
                    self._mapped = mmap.mmap(self.fd, capacity)
                except (OSError, ValueError) as error:
                    os.close(self.fd)
                    raise ArenaError(f"{ByteSize(capacity)} of memory cannot be had: {error}") from error

            def start(self, on_ready):
                self._thread = threading.Thread(target=self._take, args=(on_ready,), daemon=True)
                self._thread.start()

            def _take(self, on_ready):
                for start in range(0, self.capacity, STEP):
                    if self._stop.is_set():
                        return
                    length = min(STEP, self.capacity - start)
                    os.posix_fallocate(self.fd, start, length)
                    on_ready(start + length)

            def view(self):
                return memoryview(self._mapped)

            def close(self):
                self._stop.set()
                if self._thread is not None:
                    self._thread.join()
                self._mapped.close()
                if self.fd >= 0:
                    os.close(self.fd)
                    self.fd = -1

        def create(options, context):
            return SharedMemory(options.capacity)

        @hookimpl
        def kvf_memories():
            return [MemoryProvider(name="shared", summary="a memfd", options=SharedOptions, create=create)]
    """


@_hookspec
def kvf_tiers() -> list[TierProvider]:  # type: ignore[type-arg,empty-body]
    """Tiers: L2 stores, which keep values for longer than the memory of one node.

    Example, a tier in a dict (entry point `tier.dict`):

        import time
        from kvframework.api.copying import copy_bytes, joined
        from kvframework.api.tier import Outcome, Tier, TierError, TierProvider, hookimpl

        class DictTier(Tier):
            name = "dict"

            def __init__(self):
                self._values = {}
                self._closed = False

            def _check(self, deadline):
                if self._closed:
                    raise TierError("the tier is closed", where=self.name)
                if time.monotonic() >= deadline:
                    raise TierError("the deadline has passed", where=self.name)

            def contains(self, keys, *, deadline):
                self._check(deadline)
                return [Outcome.FOUND if key in self._values else Outcome.MISSING for key in keys]

            def get_into(self, keys, parts, *, deadline):
                self._check(deadline)
                return [self._get(key, buffers) for key, buffers in zip(keys, parts)]

            def _get(self, key, buffers):
                value = rest = self._values.get(key)
                if value is None:
                    return Outcome.MISSING
                if len(value) > sum(buffer.nbytes for buffer in buffers):
                    return Outcome.DAMAGED
                for buffer in buffers:
                    piece, rest = rest[: buffer.nbytes], rest[buffer.nbytes :]
                    copy_bytes(buffer[: len(piece)], piece)
                return len(value)

            def put(self, keys, parts, *, deadline):
                self._check(deadline)
                self._values.update((key, joined(buffers)) for key, buffers in zip(keys, parts))
                return [Outcome.STORED] * len(keys)

            def delete(self, keys, *, deadline):
                self._check(deadline)
                return [Outcome.DELETED if self._values.pop(key, None) is not None else Outcome.MISSING for key in keys]

            def close(self):
                self._closed = True

        @hookimpl
        def kvf_tiers():
            return [TierProvider(name="dict", summary="a dict", create=lambda options, context: DictTier())]
    """


@_hookspec
def kvf_eviction_policies() -> list[EvictionProvider]:  # type: ignore[type-arg,empty-body]
    """Eviction policies: which object leaves L1 first.

    Example, first in first out (entry point `eviction.fifo`):

        from kvframework.api.eviction import EvictionPolicy, EvictionProvider, hookimpl

        class Fifo(EvictionPolicy):
            name = "fifo"

            def __init__(self):
                self._keys = {}

            def on_insert(self, key, nbytes):
                self._keys[key] = None

            def on_access(self, key):
                pass

            def on_remove(self, key):
                del self._keys[key]

            def victims(self):
                return iter(self._keys)

        @hookimpl
        def kvf_eviction_policies():
            return [EvictionProvider(name="fifo", summary="oldest first", create=lambda options: Fifo())]
    """


@_hookspec
def kvf_key_hashers() -> list[HasherProvider]:  # type: ignore[type-arg,empty-body]
    """Key hashers: from token ids to chained chunk digests.

    Example, BLAKE2b (entry point `hasher.blake2b`):

        import hashlib
        from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, HasherProvider, KeyHasher, hookimpl
        from kvframework.errors import RequestError

        class Blake2b(KeyHasher):
            name = "blake2b"
            fingerprint = "blake2b-256/1"

            def chunk_digests(self, tokens, chunk_tokens, *, parent=b"", extras=None):
                if len(parent) not in (0, DIGEST_BYTES) or chunk_tokens < 1:
                    raise RequestError(f"a parent of {len(parent)} bytes, chunks of {chunk_tokens} tokens")
                view, step, digests = memoryview(tokens).cast("B"), chunk_tokens * TOKEN_BYTES, []
                digest = parent or bytes(DIGEST_BYTES)
                for index in range(view.nbytes // step):
                    extra, chunk = (extras or {}).get(index, b""), view[index * step : (index + 1) * step]
                    digest = hashlib.blake2b(b"".join((digest, extra, chunk)), digest_size=DIGEST_BYTES).digest()
                    digests.append(digest)
                return b"".join(digests)

        @hookimpl
        def kvf_key_hashers():
            return [HasherProvider(name="blake2b", summary="BLAKE2b", create=lambda options: Blake2b())]
    """


@_hookspec
def kvf_codecs() -> list[CodecProvider]:  # type: ignore[type-arg,empty-body]
    """Codecs: how an object's bytes are packed on their way to an L2 tier.

    Example, zlib (entry point `codec.zlib`):

        import zlib
        from kvframework.api.codec import Codec, CodecProvider, hookimpl
        from kvframework.api.copying import copy_bytes

        class Zlib(Codec):
            name = "zlib"

            def encode(self, data):
                return [memoryview(zlib.compress(data, 1))]

            def decode_into(self, packed, out):
                stream = zlib.decompressobj()
                try:
                    data = stream.decompress(packed, out.nbytes + 1)  # a bomb goes no further
                except zlib.error as error:
                    raise ValueError(f"no zlib stream: {error}") from error
                if len(data) != out.nbytes or not stream.eof or stream.unused_data:
                    raise ValueError(f"no whole stream of {out.nbytes} bytes")
                copy_bytes(out, data)

        @hookimpl
        def kvf_codecs():
            return [CodecProvider(name="zlib", summary="zlib, level 1", create=lambda options: Zlib())]
    """


@_hookspec
def kvf_request_handlers() -> list[RequestsProvider]:  # type: ignore[type-arg,empty-body]
    """Requests of a plugin's own, in its own namespace of names.

    Example, `echo.SAY` (entry point `requests.echo`):

        from kvframework.api.requests import Handler, Message, RequestSpec, RequestsProvider, hookimpl

        class Say(Message, frozen=True):
            text: str

        def create(options, services):
            return [Handler(RequestSpec("echo.SAY", Say, Say), lambda client, payload, buffers: payload)]

        @hookimpl
        def kvf_request_handlers():
            return [RequestsProvider(name="echo", summary="says it again", create=create)]
    """


@_hookspec
def kvf_listeners() -> list[ListenerProvider]:  # type: ignore[type-arg,empty-body]
    """Listeners: what a server's requests did, read off the serving thread.

    Example, a log of how L1 grows and shrinks (entry point `listener.growth`):

        import logging
        from kvframework.api.listener import Added, Listener, ListenerProvider, Removed, hookimpl

        log = logging.getLogger(__name__)

        class Growth(Listener):
            def __init__(self):
                self._added = self._removed = self._lost = 0

            def listen(self, records):
                for batch in records:  # ends with the server
                    self._lost += batch.lost  # the ring was full: what is counted here is too little
                    for record in batch.records:
                        if isinstance(record, Added):
                            self._added += len(record.keys)
                        elif isinstance(record, Removed):
                            self._removed += len(record.keys)
                    log.debug("%d objects added, %d removed", self._added, self._removed)

            def status(self):
                return {"added": self._added, "removed": self._removed, "lost": self._lost}

        @hookimpl
        def kvf_listeners():
            return [ListenerProvider(name="growth", summary="what L1 gains", create=lambda options, context: Growth())]
    """
