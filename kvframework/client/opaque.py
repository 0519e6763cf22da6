"""Objects by size and group, without tensors: one registration for all processes of an engine that moves the bytes
itself, lookups and stores of its own keys, and the arena for its other processes. Engine side."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvframework.api.futures import Future
from kvframework.api.keys import DIGEST_BYTES, CacheKey, Retain, compute_namespace
from kvframework.api.layout import MAX_OBJECT_BYTES, KVLayout, LayerGroup, Layout
from kvframework.api.transport import ArenaRange, StorePlan
from kvframework.client.arena_mapping import MappedArena
from kvframework.client.kv_client import KVClient
from kvframework.errors import BadLayout, DeadlineExceeded, KVFrameworkError, ProtocolError, ServerGone, VersionMismatch
from kvframework.messaging.client.liveness import LivenessLink
from kvframework.pricing import EngineSpeed
from kvframework.supervise.state import Backoff
from kvframework.wire import messages as m
from kvframework.wire.messages import KeyGroup
from kvframework.wire.transfer_blocks import unpack_indices, unpack_offsets

log = logging.getLogger(__name__)

# The bytes of one block of a declaration; larger objects are declared in parts.
_MOST_BLOCK = 1 << 24


@dataclass(frozen=True)
class OpaqueObjects:
    """An engine's objects and their name. `object_bytes` has the size of an object of each group, `unit_tokens` divides
    the tokens of each group's chunk. `revision`, `quantization` and `packing` go into the namespace: every difference
    between the bytes of two engines must show there."""

    instance_id: int
    model_name: str
    object_bytes: Sequence[int]
    unit_tokens: int
    packing: str
    revision: str = ""
    quantization: str = ""
    model_dtype: str = ""


class Prompt(NamedTuple):
    """The tokens `[start, end)` of a request, whole units, for a lookup or a store."""

    request_id: str
    start: int
    end: int
    cache_salt: str = ""
    trace: str = ""
    retain: tuple[Retain, ...] = ()
    conversation: str = ""


class ArenaTicket(NamedTuple):
    """The ticket with which another process of the engine maps the arena, see `map_arena`; as secret as the session."""

    path: str
    session: bytes
    boot_id: bytes


class OpaqueInstance:
    """One registered instance, renewed with each session of the client, until `close`; a thread registers it first.
    Thread-safe. While it is not registered, calls fail with `ServerGone`. The constructor never blocks, and raises
    `BadLayout` for sizes that cannot be declared."""

    def __init__(self, client: KVClient, objects: OpaqueObjects) -> None:
        self._client = client
        self._objects = objects
        self._layout = _declared(objects)
        self._namespace: bytes | None = None
        # Those of the registration. It ends with its session, also where the server lives on; other processes of the
        # engine may keep that session for a while, so the next one has a separate id.
        self._session, self._id = b"", objects.instance_id
        self._ticket: ArenaTicket | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        client.when_up(self._register)
        # Whether the first registration is under way, at a server that is there.
        self.is_registering = client.boot_id is not None
        if self.is_registering:
            threading.Thread(target=self._register_first, name="kvf-register", daemon=True).start()

    def close(self) -> None:
        """End the registration. Never blocks, never raises."""
        self._closed.set()
        self._client.forget(self._register)
        if self._namespace is not None:
            self._client.send("UNREGISTER_KV_CACHE", m.Unregister(self._id))

    @property
    def is_ready(self) -> bool:
        """Whether the instance is registered at a server that answers. Never blocks."""
        return self._namespace is not None and self._client.usable and self._session == self._client.hello.session

    @property
    def ticket(self) -> ArenaTicket | None:
        """The ticket of the arena as it is mapped now; None without a server, or over TCP."""
        return self._ticket if self.is_ready else None

    def lookup(
        self, prompt: Prompt, groups: Sequence[KeyGroup], *, wait_s: float = 0.0, speed: EngineSpeed | None = None
    ) -> Future[m.LookupReply]:
        """Ask for the longest usable hit, pin it under a ticket, and load what L2 has of it. Once the answer is not
        pending its one grant has the places in the arena, see `granted_objects`. Never blocks, never raises."""
        key = self._key(prompt, None)
        if key is None:
            return Future.failed(ServerGone("this engine is not registered at the server"))
        freed = self._client.take_freed()
        payload = m.LookupKeys(key, wait_s, speed, freed, (self._id,), groups=tuple(groups))
        return self._client.begin("LOOKUP_KEYS", payload, m.LookupReply)

    def ask_again(self, ticket: str, *, wait_s: float = 0.0) -> Future[m.LookupReply]:
        """Return the future of a pending lookup's new state. Never blocks, never raises."""
        return self._client.begin("QUERY_PREFETCH_STATUS", m.PrefetchQuery(ticket, wait_s), m.LookupReply, waits=False)

    def release(self, *tickets: str) -> None:
        """Free tickets, and leases of grants that no load uses. Never blocks, never raises."""
        self._client.free_soon(*[ticket for ticket in tickets if ticket])

    def loaded(self, lease: str, took_s: float) -> None:
        """End the pins of a grant whose load has ended. Never blocks."""
        self._client.send("COMMIT_RETRIEVE", m.Commit(lease, took_s=took_s))

    def prepare_store(self, prompt: Prompt, groups: Sequence[KeyGroup]) -> Future[StorePlan]:
        """Reserve places for the objects that are absent; `chunk` of a range counts from its group's first key. Neither
        it nor the plan's `commit` waits or raises."""
        key = self._key(prompt, 0)
        if key is None:
            return Future.failed(ServerGone("this engine is not registered at the server"))
        payload = m.PrepareKeys(key, self._id, tuple(groups))
        sizes = self._objects.object_bytes

        def check(ranges: Sequence[ArenaRange]) -> None:
            for place in ranges:
                if not 0 <= place.group < len(sizes) or place.length != sizes[place.group]:
                    raise ProtocolError(f"the answer names {place}", available=f"objects of {list(sizes)} bytes")

        return self._client.prepare_store_keys(payload, check)

    def _key(self, prompt: Prompt, worker_id: int | None) -> CacheKey | None:
        namespace = self._namespace
        if namespace is None:
            return None
        return CacheKey(
            self._objects.model_name,
            1,
            worker_id,
            namespace,
            prompt.start,
            prompt.end,
            prompt.request_id,
            cache_salt=prompt.cache_salt,
            trace=prompt.trace,
            retain=prompt.retain,
            conversation=prompt.conversation,
        )

    def _register_first(self) -> None:
        """Register at a server that may be slow to answer. A new session registers by itself."""
        backoff = Backoff(0.1, 5.0)
        while not self._closed.is_set():
            try:
                self._register()
            except ServerGone:
                pass
            except DeadlineExceeded as error:
                log.warning("the engine is not registered yet: %s", error)
                self.is_registering = False
                self._closed.wait(backoff.delay(time.monotonic()))
                continue
            except KVFrameworkError as error:
                log.error("the engine stores and loads nothing, because the server refused it: %s", error)
            break
        self.is_registering = False

    def _register(self) -> None:
        """Register in this session, also in the connection's thread."""
        with self._lock:
            client, objects, hello = self._client, self._objects, self._client.hello
            if hello.session == self._session:
                return
            instance_id = secrets.randbits(62) if self._session else objects.instance_id
            options, where = {"packing": objects.packing}, "objects by size"
            plugin: Layout = client.plugins.create("layout", self._layout.format, options, where=where)
            desc = plugin.object_desc(self._layout, hello.chunk_size)
            transport = next((name for name in hello.transports if name == "cpu_gather"), hello.transports[-1])
            namespace = compute_namespace(
                model=objects.model_name,
                desc=desc,
                hasher_fingerprint=hello.hasher_fingerprint,
                world_size=1,
                revision=objects.revision,
                quantization=objects.quantization,
                packing=objects.packing,
            )
            model, dtype = objects.model_name, objects.model_dtype
            payload = m.RegisterKvCache(instance_id, model, 1, 0, namespace, transport, self._layout, model_dtype=dtype)
            reply = client.request("REGISTER_KV_CACHE", payload, m.Registered, urgent=True)
            if reply.desc != desc:
                raise VersionMismatch(f"the server computes the object layout {reply.desc}", available=str(desc))
            self._ticket = ArenaTicket(hello.liveness, hello.session, hello.boot_id) if hello.liveness else None
            self._namespace, self._session, self._id = namespace, hello.session, instance_id


def _declared(objects: OpaqueObjects) -> KVLayout:
    groups, unit = [], objects.unit_tokens
    for nbytes in objects.object_bytes:
        if not 0 < nbytes <= MAX_OBJECT_BYTES:
            raise BadLayout(f"an object has {nbytes} bytes", available=f"1 to {MAX_OBJECT_BYTES} bytes")
        parts = next(n for n in itertools.count(math.ceil(nbytes / _MOST_BLOCK)) if not nbytes % n)
        block = LayerGroup(parts, unit, 1, nbytes // parts, "uint8", 1, ("block", "dim"), packing=objects.packing)
        groups.append(block)
    return KVLayout("opaque", tuple(groups), chunk_tokens=objects.unit_tokens)


def granted_objects(reply: m.LookupReply, groups: Sequence[KeyGroup]) -> Iterator[tuple[int, int, int]]:
    """Yield (group, index of the key in it, offset in the arena) of each object of the answer's grant. Raises
    `ProtocolError` and `InvalidPayload`."""
    if not reply.grants:
        return
    offsets = unpack_offsets(reply.grants[0].offsets, where="offsets")
    positions = unpack_indices(reply.grants[0].objects, where="objects")
    if len(offsets) != len(positions):
        raise ProtocolError(f"the server granted {len(offsets)} ranges", available=f"{len(positions)} objects")
    ends = list(itertools.accumulate(len(group.digests) // DIGEST_BYTES for group in groups))
    group = 0
    for position, offset in zip(positions, offsets, strict=True):
        while position >= ends[group]:
            group += 1
        yield group, position - (ends[group - 1] if group else 0), offset


def map_arena(ticket: ArenaTicket, timeout: float = 5.0) -> MappedArena:
    """Map the arena in a further process of the session. The session then lasts until all its processes have ended, so
    the server gives no range that this process still writes to another client. Blocking. Raises `ServerGone`,
    `EndpointError` and `OSError`."""
    link, arena_fd = LivenessLink.connect(ticket.path, ticket.session, timeout)
    if arena_fd is None:
        link.close()
        raise ServerGone("this server shares no memory (arena)")
    try:
        return MappedArena(arena_fd, link.duplicate())
    finally:
        link.close()
