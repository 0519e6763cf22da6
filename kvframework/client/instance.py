"""The registration of an instance, repeated after every restart of the server: from the engine's tensors to a layout, a
namespace, a transport and the request. The first one runs in the engine's thread, others in the connection's."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from kvframework import errors
from kvframework.api.copying import address_of
from kvframework.api.futures import Future, Promise
from kvframework.api.installing import warn_of_missing_kernels
from kvframework.api.keys import CacheKey, compute_namespace
from kvframework.api.layout import EngineView, KVLayout, LayerTensors, Layout, MemoryLayoutDesc, with_chunk
from kvframework.api.transport import Arena, Registration, Transfer, TransferContext
from kvframework.client.kv_client import KVClient, bare_transfer
from kvframework.client.shards import ModelPart, ShardedLayout, Shards, shards_of
from kvframework.logs.limit import LogLimit
from kvframework.supervise.state import Backoff
from kvframework.wire import messages as m
from kvframework.wire.protocol import non_gpu_layout

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

AUTO = "auto"
_RECOVER_FIRST_S, _RECOVER_LONGEST_S = 0.1, 5.0
# What no wait can mend: the two sides, or the tensors and their declaration, do not fit.
_REFUSALS = (errors.BadLayout, errors.TransportMismatch, errors.VersionMismatch)


@dataclass(kw_only=True, eq=False)
class InstanceIdentity:
    """The names of an instance and its KV. `revision`, `quantization` and `packing` go into the namespace: every
    difference between the KV of two engines must show here. `part` is what the rank holds of the whole model, None if
    that is not known: then only engines of equal sizes share objects. `model_dtype` is for the server's status only."""

    model_name: str
    instance_id: int = field(default_factory=lambda: secrets.randbits(62))
    world_size: int = 1
    rank: int = 0
    revision: str = ""
    quantization: str = ""
    packing: str = ""
    layout: str = "paged"
    layout_options: Mapping[str, object] = field(default_factory=dict)
    transport: str = AUTO
    transport_options: Mapping[str, object] = field(default_factory=dict)
    part: ModelPart | None = None
    model_dtype: str = ""


class Registered(NamedTuple):
    """One registration: the engine's own, and that of the transport. They differ where objects are shards: the
    transport's layer groups are then the engine's, once for each of `shards`."""

    own: Registration
    moved: Registration
    shards: Shards | None


@dataclass(eq=False, repr=False)
class Instance:
    """One registered instance, until `close`. The tensors are borrowed until then. The constructor waits for the server
    and raises a typed error with the setting to change, or `ServerGone`. With the engine's own `view` the declaration
    is proven by a canary, and a wrong one is refused with `BadLayout`."""

    client: KVClient
    identity: InstanceIdentity
    kv_caches: Mapping[str, LayerTensors]
    block_size: InitVar[int]
    view: InitVar[EngineView | None]

    def __post_init__(self, block_size: int, view: EngineView | None) -> None:
        client, identity = self.client, self.identity
        where = f"layout of instance {identity.instance_id}"
        self._layout: Layout = client.plugins.create("layout", identity.layout, identity.layout_options, where=where)
        self._declared = self._layout.describe(self.kv_caches, block_size=block_size)
        self._closed = threading.Event()
        self._again: threading.Thread | None = None
        self._lock = threading.Lock()
        self._registering = threading.Lock()
        self._exports = False
        self._arena_ends: Future[None] = Future.resolved(None)
        self._refused = False
        self._choose_transport(f"transport of instance {identity.instance_id}")
        client.when_up(self._register_again)
        try:
            if client.boot_id != self._asked:
                # The server restarted meanwhile, perhaps before the callback was registered.
                with contextlib.suppress(errors.AlreadyRegistered, errors.ServerGone), self._registering:
                    self.registered = self._register(urgent=True)
            if view is not None:
                from kvframework.client.canary import check_by_writing

                view.declared(self._declared)
                check_by_writing(self._gathered, self._declared, view)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregister, if the server is there. Waits for copies under way: afterwards the server has none of the tensors
        mapped, and they may be freed. A server that cannot confirm this in time is logged. Waits for its answer
        `setup_s`, where it maps the engine's memory `transfer_s`."""
        self._closed.set()
        self.client.forget(self._register_again)
        if self._again is not None:
            self._again.join()
        with self._registering:
            try:
                self._unregister(urgent=self._exports)
            finally:
                # Only now: until the server has closed its mappings it may refer to the transport's resources.
                self._arena_ends.cancel()
                self.transfer.close()

    def _choose_transport(self, where: str) -> None:
        """Register with the first transport that both sides have, in the server's order, and that accepts the engine's
        memory; or with the one that is wanted by name. Where a transport cannot move the engine's memory, or the server
        cannot open it, "auto" logs that and tries the next. Raises `TransportMismatch` if none is left, else the error
        of the only one, or of the one by name."""
        client, wanted = self.client, self.identity.transport
        offered = client.hello.transports
        refused: list[str] = []
        last: errors.BadLayout | None = None
        for name in offered if wanted == AUTO else (wanted,):
            if name not in offered:
                refused.append(f"{name}: the server has {', '.join(offered)}")
                continue
            try:
                options = self.identity.transport_options
                transfer: TransferContext = client.plugins.create("transport", name, options, client, where=where)
            except (errors.PluginError, errors.DeviceError) as error:
                refused.append(_reason(name, error))
                continue
            try:
                self._transport, self.transfer = name, transfer
                # The server that is asked: known only now, if the client was not connected before.
                self._asked = client.boot_id
                self.registered = self._register(urgent=False)
            except BaseException as error:
                self._arena_ends.cancel()
                self.transfer.close()
                if wanted != AUTO or not isinstance(
                    error, (errors.DeviceError, errors.BadLayout, errors.TransportMismatch)
                ):
                    raise
                log.warning("transport %s is left out, because it cannot use this engine's memory: %s", name, error)
                refused.append(_reason(name, error))
                last = error if isinstance(error, errors.BadLayout) else None
            else:
                return
        if last is not None and len(refused) == 1:
            raise last
        raise errors.TransportMismatch(
            "engine and server share no transport", where=where, available="; ".join(refused)
        )

    def recover(self) -> None:
        """Register again, in the background, since the server lost this instance's memory; not after a refusal that no
        wait can mend, until there is another server. Never blocks."""
        with self._lock:
            if self._closed.is_set() or self._refused or (self._again is not None and self._again.is_alive()):
                return
            again = threading.Thread(target=self._recover, name="kvf-register", daemon=True)
            try:
                again.start()
            except RuntimeError as error:  # no thread is left; the next transfer that fails comes here again
                log.warning("instance %d cannot register again for now: %s", self.identity.instance_id, error)
                return
            self._again = again

    def _recover(self) -> None:
        """Retry until it succeeds, another thread has registered, it is refused for good, or the instance is closed."""
        backoff = Backoff(_RECOVER_FIRST_S, _RECOVER_LONGEST_S)
        while not self._closed.is_set():
            try:
                with contextlib.suppress(errors.AlreadyRegistered):
                    self._register_anew(urgent=False)
                return
            except _REFUSALS as error:
                self._refused = True
                log.error("instance %d is not registered: the server refused it: %s", self.identity.instance_id, error)
                return
            except errors.KVFrameworkError as error:
                log.warning("instance %d could not register again: %s", self.identity.instance_id, error)
            self._closed.wait(backoff.delay(time.monotonic()))

    def _register_again(self) -> None:
        """Register at a new server, in the connection's thread, which the failure of a device does not concern."""
        try:
            self._register_anew(urgent=True)
        except errors.DeviceError as error:
            log.warning("instance %d could not register again: %s", self.identity.instance_id, error)
            self.recover()

    def _register_anew(self, *, urgent: bool) -> None:
        with self._registering:
            if self._closed.is_set():
                return
            self.registered = self._register(urgent=urgent)
            self._refused = False
        log.info("instance %d registered again", self.identity.instance_id)

    def _offer_arena(self) -> None:
        """Show the transport the arena that is mapped now, once, and its end: with the session or the instance."""
        arena, transfer = self.client.arena, self.transfer
        if arena is None or not self._arena_ends.query():
            return

        def ended(_: object) -> None:
            try:
                transfer.on_arena(None)
            except Exception:
                log.exception("transport %s could not forget the arena", self._transport)

        with address_of(arena.view) as (address, _):
            transfer.on_arena(Arena(arena.view, address))
        self._arena_ends = Promise()
        self._arena_ends.add_done_callback(ended)
        self.client.cancel_when_down(self._arena_ends)

    def _gathered(self, blocks: Sequence[int]) -> list[bytes]:
        """One block of each layer group, through the path that stores take."""
        shards = self.registered.shards
        if shards is None:
            return self.transfer.gather_block(self.kv_caches, blocks)
        gathered = self.transfer.gather_block(self.kv_caches, [*blocks] * len(shards.ranks))
        return shards.whole_blocks(self._declared, gathered)

    def _register(self, *, urgent: bool) -> Registered:
        identity, client, hello = self.identity, self.client, self.client.hello
        if self._transport not in hello.transports:
            raise errors.TransportMismatch(
                f"the server no longer has transport {self._transport!r}", available=", ".join(hello.transports)
            )
        shards = self._shards(self._layout.object_desc(self._declared, hello.chunk_size), hello)
        own = declared = _with_chunk(self._declared, hello, identity, shards)
        whole = self._layout.object_desc(own, hello.chunk_size)
        layout, desc, one_rank = self._layout, whole, whole
        ranks: tuple[int, ...] = (identity.rank,)
        world_size = identity.world_size
        if shards is not None:
            ranks, world_size = shards.ranks, shards.world_size
            layout, declared = ShardedLayout(layout, own, shards), shards.layout(own)
            desc = layout.object_desc(declared, hello.chunk_size)
            one_rank = replace(desc, groups=desc.groups[: len(whole.groups)])
        self._offer_arena()
        self.transfer.on_layout(layout, declared)
        handles = self.transfer.memory_handles(self.kv_caches)
        self._exports = bool(handles)
        payload = m.RegisterKvCache(
            instance_id=identity.instance_id,
            model_name=identity.model_name,
            world_size=world_size,
            rank=ranks[0],
            namespace=_namespace_of(hello, identity, one_rank, shards),
            transport=self._transport,
            layout=declared,
            handles=handles,
            ranks=() if shards is None else ranks,
            model_dtype=identity.model_dtype,
        )
        reply = client.request(
            "REGISTER_KV_CACHE",
            payload,
            m.Registered,
            urgent=urgent,
            # A device's copier may have to be started first.
            timeout=client.deadlines.export_s if handles else client.deadlines.setup_s,
            on_late=lambda _: client.send("UNREGISTER_KV_CACHE", m.Unregister(identity.instance_id)),
        )
        try:
            if (reply.namespace, reply.desc) != (payload.namespace, desc):
                fact = f"the server computes another object layout: {reply.desc}"
                hint = "install the same kvframework release for the engine and the server"
                raise errors.VersionMismatch(fact, available=str(desc), hint=hint)
            moved = Registration(
                identity.instance_id,
                ranks[0],
                reply.namespace,
                declared,
                desc,
                world_size,
                shards=0 if shards is None else len(ranks),
                since=time.monotonic(),
            )
            self.transfer.on_registered(moved, layout)
        except BaseException:
            self._unregister(urgent=True)  # the engine's side refuses what the server has registered
            raise
        self._declared = own = replace(own, chunk_tokens=whole.chunk_tokens)  # also at a later server
        return Registered(replace(moved, layout=own, desc=whole), moved, shards)

    def _shards(self, desc: MemoryLayoutDesc, hello: m.HelloReply) -> Shards | None:
        """Return the shards that the server asks for; None if it asks for none, or the objects are no whole shards."""
        if hello.tp_lcm == hello.pp_lcm == 1:
            return None
        part, why = self.identity.part, "the engine's integration does not say which part of the model a rank holds"
        if part is not None:
            try:
                return shards_of(self._declared, desc, part, tp_lcm=hello.tp_lcm, pp_lcm=hello.pp_lcm)
            except errors.BadLayout as error:
                why = error.fact
        text = "instance %d shares KV only with engines of equal parallel sizes, although tp_lcm is %d, pp_lcm %d: %s"
        log.warning(text, self.identity.instance_id, hello.tp_lcm, hello.pp_lcm, why)
        return None

    def _unregister(self, *, urgent: bool) -> None:
        if not urgent and not self.client.usable:
            return
        deadlines, payload = self.client.deadlines, m.Unregister(self.identity.instance_id)
        # The answer follows the server's own copies; a silent server may be in the midst of one.
        timeout = deadlines.transfer_s if self._exports else deadlines.setup_s
        try:
            self.client.request("UNREGISTER_KV_CACHE", payload, m.Empty, urgent=urgent, timeout=timeout)
        except errors.ServerGone:
            pass  # and its mappings ended with it
        except errors.KVFrameworkError as error:
            doubt = ", whose memory the server may still use" if self._exports else ""
            log.warning("instance %d could not unregister%s: %s", self.identity.instance_id, doubt, error)


def _reason(name: str, error: errors.KVFrameworkError) -> str:
    return f"{name}: {error.fact}" + (f" ({error.hint})" if error.hint else "")


def _with_chunk(declared: KVLayout, hello: m.HelloReply, identity: InstanceIdentity, shards: Shards | None) -> KVLayout:
    """Return the declaration with the chunk that the server leaves to the model: that of one shard, which engines of
    other sizes hold, too. The stages of a pipeline hold different numbers of layers, and take the server's."""
    if shards is None:
        is_stage = identity.part is not None and bool(identity.part.stage)
        return declared if is_stage else with_chunk(declared, hello.least_chunk, hello.chunk_size)
    one = replace(declared, groups=shards.layout(declared).groups[: len(declared.groups)])
    return replace(declared, chunk_tokens=with_chunk(one, hello.least_chunk, hello.chunk_size).chunk_tokens)


def _namespace_of(
    hello: m.HelloReply, identity: InstanceIdentity, desc: MemoryLayoutDesc, shards: Shards | None
) -> bytes:
    """Return the 16 bytes that scheduler and workers of one deployment share; `desc` is that of one rank's objects."""
    stage = identity.part.stage if identity.part is not None and shards is None else ""
    return compute_namespace(
        model=identity.model_name,
        desc=desc,
        hasher_fingerprint=hello.hasher_fingerprint,
        world_size=identity.world_size if shards is None else shards.world_size,
        split=() if shards is None else shards.split,
        revision=identity.revision + stage,
        quantization=identity.quantization,
        packing=identity.packing,
    )


@dataclass(frozen=True)
class CanonicalInstance:
    """A registered instance of an engine that holds canonical objects itself: no tensors, no torch. Its stores and
    loads use `KVClient.prepare_store` and its siblings, into and out of the mapped arena."""

    registration: Registration

    @property
    def namespace(self) -> bytes:
        """The registration's namespace, 16 bytes."""
        return self.registration.namespace

    def transfer(self, key: CacheKey) -> Transfer:
        """Return the transfer of the key's tokens, for `KVClient.prepare_store` and `prepare_load`: it has no blocks,
        the caller writes and reads whole objects itself. Raises `BadRange`."""
        return bare_transfer(self.registration, key)


def register_canonical(
    client: KVClient,
    *,
    instance_id: int,
    model_name: str,
    block_size: int,
    num_layers: int,
    hidden_dim_size: int,
    dtype: str,
    use_mla: bool = False,
    world_size: int = 1,
) -> CanonicalInstance:
    """Register one layer group whose objects are `[planes, layers, tokens, hidden]`, all ranks of `world_size` alike.

    `hidden_dim_size` is the elements of one token, one layer, one plane; `use_mla` means one latent plane instead of K
    and V; `dtype` is a name such as "bfloat16". The registration ends with the client, and is not renewed after a
    reconnect. Blocking. Raises `BadLayout`, `BadDtype`, `AlreadyRegistered`, `TransportMismatch` if the server has no
    engine-driven transport, and the errors of `KVClient.request`."""
    warn_of_missing_kernels()
    payload = m.RegisterNonGpuContextPayload(
        instance_id=instance_id,
        model_name=model_name,
        world_size=world_size,
        block_size=block_size,
        num_layers=num_layers,
        hidden_dim_size=hidden_dim_size,
        dtype_str=dtype,
        use_mla=use_mla,
    )
    reply = client.request("REGISTER_KV_CACHE_NON_GPU_CONTEXT", payload, m.Registered)
    layout, since = non_gpu_layout(payload), time.monotonic()
    return CanonicalInstance(Registration(instance_id, 0, reply.namespace, layout, reply.desc, since=since))
