"""REGISTER_KV_CACHE, REGISTER_KV_CACHE_NON_GPU_CONTEXT and UNREGISTER_KV_CACHE. Runs on the serving thread."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvframework import errors
from kvframework.api.futures import Future, Promise
from kvframework.api.keys import LAYER_ORDER_BYTES
from kvframework.api.layout import CANONICAL, KVLayout, Layout
from kvframework.api.requests import ClientInfo, Handler, Message
from kvframework.api.transport import ServerTransport
from kvframework.service.contexts import Contexts, RegisteredContext, own_context
from kvframework.service.keys import MAX_TEXT, MAX_WORLD_SIZE
from kvframework.storage.namespaces import NamespaceRecord, NamespaceRecords
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS, natural, non_gpu_layout, non_gpu_namespace

log = logging.getLogger(__name__)

# The order of layers in an instance's objects, and whether two instances of one namespace agree on it. Pure.
#
# Objects hold a layer group's layers in sequence without their names, so two instances with another order, or other
# groups, would read each other's layers. Engines of different kinds name their layers differently, but the numbers in
# the names count layers in the model's order everywhere. So the order of an instance is its names relative to their
# natural order, in which numbers in a text compare as numbers.


def layer_order(layout: KVLayout) -> bytes:
    """Return b"" for layers that follow each other in the natural order of their names, group after group, and for
    layers without names; else `LAYER_ORDER_BYTES` bytes that are equal for equal orders only, whatever the names.
    BLAKE2b over the JSON of each group's layers as positions in the natural order of all names."""
    names = {name for group in layout.groups for name in group.layer_names}
    position = {name: number for number, name in enumerate(sorted(names, key=natural))}
    order = [[position[name] for name in group.layer_names] for group in layout.groups]
    flat = [each for group in order for each in group]
    if flat == sorted(flat):
        return b""
    encoded = msgspec.json.encode(order)
    return hashlib.blake2b(encoded, digest_size=LAYER_ORDER_BYTES, person=b"kvf-layers").digest()


def same_layers(mine: KVLayout, theirs: KVLayout) -> bool:
    """Whether two instances hold the same layers in the same places, by name; names of another kind by their order."""
    if [group.layer_names for group in mine.groups] == [group.layer_names for group in theirs.groups]:
        return True
    here, there = _places(mine), _places(theirs)
    apart = any(there.get(name, places) != places for name, places in here.items())
    return not apart and layer_order(mine) == layer_order(theirs)


def _places(layout: KVLayout) -> Mapping[str, list[tuple[int, int]]]:
    """Return the places of each layer, (layer group, place in it); two if keys and values lie in two groups."""
    places: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for group, declared in enumerate(layout.groups):
        for index, name in enumerate(declared.layer_names):
            places[name].append((group, index))
    return places


MAX_INSTANCES = 256  # per client
MAX_INSTANCES_IN_ALL = 2048
# A layout is kept as long as its instance.
MAX_LAYOUT_BYTES = 1 << 20
# The size of a handle of `TransferContext.memory_handles`.
MAX_HANDLE_FRAME_BYTES = 4096


@dataclass(frozen=True)
class AttachedTransport:
    """A configured transport; `server` is None for an engine-driven one."""

    name: str
    is_gpu: bool
    server: ServerTransport | None


@dataclass(eq=False)
class Registrations:
    contexts: Contexts
    records: NamespaceRecords
    transports: Mapping[str, AttachedTransport]
    layouts: Mapping[str, Layout]
    chunk_size: int
    least_chunk: Callable[[], int]
    hasher_fingerprint: str

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [
            Handler(REQUESTS["REGISTER_KV_CACHE"], self._register),
            Handler(REQUESTS["REGISTER_KV_CACHE_NON_GPU_CONTEXT"], self._register_non_gpu),
            Handler(REQUESTS["UNREGISTER_KV_CACHE"], self._unregister),
        ]

    def end_session(self, client: ClientInfo) -> int:
        ending = [c for c in self.contexts.values() if c.session_id == client.session_id]
        for context in ending:
            self._end(context)
        return len(ending)

    def _register(
        self, client: ClientInfo, payload: m.RegisterKvCache, _buffers: object
    ) -> m.Registered | Future[Message]:
        transport = self.transports.get(payload.transport)
        if transport is None:
            fact = f"transport {payload.transport!r} is not configured"
            hint = "add a [[transport]] table to the server's TOML"
            raise errors.TransportMismatch(fact, available=", ".join(self.transports), hint=hint)
        plugin = self.layouts.get(payload.layout.format)
        if plugin is None:
            raise errors.BadLayout(
                f"layout {payload.layout.format!r} is not configured",
                available=", ".join(self.layouts),
                hint="add a [[layout]] table to the server's TOML",
            )
        if (transport.server is None) == bool(payload.handles):
            raise errors.TransportMismatch(
                f"the request has {len(payload.handles)} memory handles for transport {transport.name!r}",
                available="none: the transport is engine-driven" if transport.server is None else "at least one",
            )
        if transport.server is not None and not client.local:
            # Memory is exported to processes of the same user and node; a client without a liveness socket is neither.
            raise errors.TransportMismatch(
                f"transport {transport.name!r} needs a client on the server's node",
                available="ipc://, or cpu_gather over tcp://",
            )
        if any(len(handle) > MAX_HANDLE_FRAME_BYTES for handle in payload.handles):
            raise errors.MessageTooLarge(
                "a memory handle is too long", where="handles", available=f"at most {MAX_HANDLE_FRAME_BYTES} bytes"
            )
        if len(msgspec.msgpack.encode(payload.layout)) > MAX_LAYOUT_BYTES:
            raise errors.MessageTooLarge(
                "the layout's names are too long", where="layout", available=f"at most {MAX_LAYOUT_BYTES} bytes"
            )
        _check_identity(payload.model_name, payload.world_size, payload.rank)
        _check_shown("model_dtype", payload.model_dtype)
        context = self._context(
            client, payload, transport, payload.layout, rank=payload.rank, namespace=payload.namespace, plugin=plugin
        )
        self._check_shards(context)
        return self._add(context, client, payload.handles)

    def _register_non_gpu(
        self, client: ClientInfo, payload: m.RegisterNonGpuContextPayload, _buffers: object
    ) -> m.Registered | Future[Message]:
        _check_identity(payload.model_name, payload.world_size, 0)
        engine_driven = next((t for t in self.transports.values() if t.server is None), None)
        if engine_driven is None:
            fact = "this registration needs an engine-driven transport"
            hint = 'add [[transport]] use = "cpu_gather" to the server\'s TOML'
            raise errors.TransportMismatch(fact, available=", ".join(self.transports), hint=hint)
        layout = non_gpu_layout(payload, self.chunk_size, self.least_chunk())
        namespace = non_gpu_namespace(payload, self.hasher_fingerprint, layout.chunk_tokens or self.chunk_size)
        context = self._context(client, payload, engine_driven, layout, rank=None, namespace=namespace, plugin=None)
        return self._add(context, client, ())

    def _unregister(self, client: ClientInfo, payload: m.Unregister, _buffers: object) -> m.Empty | Future[Message]:
        """Answered once the server no longer maps the engine's memory, which may then be freed."""
        context = own_context(self.contexts, payload.instance_id, client)
        self._end(context)
        return _answer_after(context.memory.when_closed() if context.memory is not None else None, m.Empty())

    def _context(
        self,
        client: ClientInfo,
        payload: m.RegisterKvCache | m.RegisterNonGpuContextPayload,
        transport: AttachedTransport,
        layout: KVLayout,
        *,
        rank: int | None,
        namespace: bytes,
        plugin: Layout | None,
    ) -> RegisteredContext:
        mine = sum(1 for context in self.contexts.values() if context.session_id == client.session_id)
        if mine >= MAX_INSTANCES or len(self.contexts) >= MAX_INSTANCES_IN_ALL:
            fact = f"{len(self.contexts)} instances are registered, {mine} of them by this client"
            raise errors.AlreadyRegistered(fact, available="usually one instance per rank")
        known = self.contexts.get(payload.instance_id)
        if known is not None:
            if known.memory is None or known.memory.failure() is None:
                raise errors.AlreadyRegistered(
                    f"instance {payload.instance_id} is registered by process {known.pid}",
                    hint="unregister that instance first; every worker process needs its own instance id",
                )
            self._end(known)
        if len(namespace) != 16:
            raise errors.NamespaceMismatch(f"the namespace has {len(namespace)} bytes", available="16 bytes")
        return RegisteredContext(
            instance_id=payload.instance_id,
            session_id=client.session_id,
            pid=client.pid,
            model_name=payload.model_name,
            world_size=payload.world_size,
            rank=rank,
            namespace=namespace,
            transport=transport.name,
            is_gpu=transport.is_gpu,
            layout=layout,
            held=getattr(payload, "ranks", ()),
            layout_plugin=plugin,
            model_dtype=getattr(payload, "model_dtype", ""),
        )

    def _add(
        self, context: RegisteredContext, client: ClientInfo, handles: Sequence[bytes]
    ) -> m.Registered | Future[Message]:
        desc = context.get_layout_desc(self.chunk_size)
        self._check_layers(context)
        record = NamespaceRecord(context.model_name, context.world_size, context.rank_desc(self.chunk_size))
        self.records.add(context.namespace, record)
        server = self.transports[context.transport].server
        if server is not None:
            context.memory = server.open(client, context.layout, desc, handles)
        self.contexts[context.instance_id] = context
        self.records.retain(context.namespace)
        if context.rank is None:
            self.records.order(context.namespace, None, layer_order(context.layout))
        else:
            for rank in context.ranks:
                self.records.order(context.namespace, rank, layer_order(context.layout_of(rank)))
        log.info(
            "instance %d registered: model %s, rank %s of %d, %s over %s, %d bytes a chunk, namespace %s",
            context.instance_id,
            context.model_name,
            context.rank,
            context.world_size,
            context.layout.format,
            context.transport,
            desc.nbytes,
            context.namespace.hex()[:8],
        )
        opened = context.memory.when_open() if context.memory is not None else None
        return _answer_after(opened, m.Registered(context.namespace, desc))

    def _check_layers(self, context: RegisteredContext) -> None:
        """Check that instances of one namespace and rank hold the same layers in the same places; otherwise they would
        read each other's layers. Raises `NamespaceMismatch`."""
        for other in self.contexts.values():
            if other.namespace != context.namespace:
                continue
            for rank in _shared_ranks(context, other):
                if not same_layers(context.layout_of(rank), other.layout_of(rank)):
                    raise errors.NamespaceMismatch(
                        "the instance has its layers in another order, or in other layer groups",
                        where=f"layers of instance {context.instance_id}",
                        available=f"the order of instance {other.instance_id} (process {other.pid})",
                        hint="list the layers of both engines alike, or give one engine another revision",
                    )

    def _check_shards(self, context: RegisteredContext) -> None:
        """Check that each rank held has equal canonical groups. Raises `NamespaceMismatch`, `BadLayout`."""
        held = context.held
        if not held:
            return
        if (
            held[0] != context.rank
            or len(set(held)) < len(held)
            or not 0 <= min(held) <= max(held) < context.world_size
        ):
            raise errors.NamespaceMismatch(
                f"the instance holds the ranks {list(held)}",
                available=f"rank {context.rank}, then other ranks below {context.world_size}",
            )
        desc = context.get_layout_desc(self.chunk_size)
        count = context.rank_groups
        if not count or desc.groups != desc.groups[:count] * len(held):
            raise errors.BadLayout(
                f"the layout has {len(desc.groups)} layer groups",
                where="layout.groups",
                available=f"equal groups for each of {len(held)} ranks",
            )
        if any(group.form != CANONICAL for group in desc.groups):
            raise errors.BadLayout(
                "opaque objects cannot have shards", where="layout.groups", available=f"form {CANONICAL}"
            )

    def _end(self, context: RegisteredContext) -> None:
        del self.contexts[context.instance_id]
        self.records.release(context.namespace)
        if context.memory is not None:
            context.memory.close()
        log.info("instance %d unregistered", context.instance_id)


def _shared_ranks(mine: RegisteredContext, theirs: RegisteredContext) -> Sequence[int]:
    """Return the ranks that both instances hold; without shards one of them, since all have one layout."""
    held = mine.held or theirs.held or (max(mine.ranks[0], theirs.ranks[0]),)
    return [rank for rank in held if rank in mine.ranks and rank in theirs.ranks]


R = TypeVar("R", bound=Message)


def _answer_after(done: Future[None] | None, answer: R) -> R | Future[Message]:
    if done is None:
        return answer
    reply: Promise[Message] = Promise(lambda: None)

    def resolve(resolved: Future[None]) -> None:
        error = resolved.exception()
        if error is not None:
            reply.set_exception(error)
        else:
            reply.set_result(answer)

    done.add_done_callback(resolve)
    return reply


def _check_identity(model_name: str, world_size: int, rank: int) -> None:
    if not model_name:
        raise errors.MessageTooLarge("model_name has 0 characters", available=f"1 to {MAX_TEXT}")
    _check_shown("model_name", model_name)
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise errors.NamespaceMismatch(f"the world size is {world_size}", available=f"1 to {MAX_WORLD_SIZE}")
    if not 0 <= rank < world_size:
        raise errors.NamespaceMismatch(f"the rank is {rank}", available=f"0 to {world_size - 1}")


def _check_shown(name: str, text: str) -> None:
    """Check a text that is shown in logs and on terminals. Raises `MessageTooLarge` and `RequestError`."""
    if len(text) > MAX_TEXT:
        raise errors.MessageTooLarge(f"{name} has {len(text)} characters", available=f"at most {MAX_TEXT}")
    if not text.isprintable():
        raise errors.RequestError(
            f"{name} has characters that cannot be shown", available="printable characters, on one line"
        )
