"""The server's knowledge of one instance, whatever its transport."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvframework.api.layout import KVLayout, Layout, MemoryLayoutDesc, canonical_desc
from kvframework.api.requests import CacheKey, ClientInfo, InstanceContext
from kvframework.api.transport import ServerContext
from kvframework.errors import NamespaceMismatch, NotRegistered, RequestError
from kvframework.messaging.polling import peer_of

MAX_SHOWN = 128
# Instance id -> context, once per server. Filled by the registration handlers, read by all others.
Contexts = dict[int, "RegisteredContext"]


@dataclass(eq=False)
class RegisteredContext(InstanceContext):
    """One engine worker process (one rank) with registered KV memory.

    `rank` is None if the registration did not name it; `held` are the ranks of an instance whose objects are shards,
    `rank` first, and its `layout` has the layer groups of each. `memory` is the server half of a server-driven
    transport, None for an engine-driven one. `layout_plugin` None means canonical objects. `model_dtype` is what the
    engine says its model computes in, "" if it does not."""

    instance_id: int
    session_id: int
    pid: int
    model_name: str
    world_size: int
    rank: int | None
    namespace: bytes
    transport: str
    is_gpu: bool
    layout: KVLayout
    held: tuple[int, ...] = ()
    layout_plugin: Layout | None = None
    memory: ServerContext | None = None
    model_dtype: str = ""
    attached: dict[str, object] = field(default_factory=dict)
    _descs: dict[int, MemoryLayoutDesc] = field(default_factory=dict)
    # Made once: 2048 instances of 64 groups would take seconds for each status.
    _description: dict[str, object] = field(default_factory=dict)

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.world_size) if self.rank is None else self.held or (self.rank,)

    @property
    def rank_groups(self) -> int:
        return len(self.layout.groups) // max(len(self.held), 1)

    def layout_of(self, rank: int) -> KVLayout:
        if len(self.held) <= 1:
            return self.layout
        first = self.held.index(rank) * self.rank_groups
        return replace(self.layout, groups=self.layout.groups[first : first + self.rank_groups])

    def rank_desc(self, chunk_size: int) -> MemoryLayoutDesc:
        """Shape and dtype of one object per layer group of one rank; all ranks are alike."""
        desc = self.get_layout_desc(chunk_size)
        return desc if len(self.held) <= 1 else replace(desc, groups=desc.groups[: self.rank_groups])

    def get_layout_desc(self, chunk_size: int) -> MemoryLayoutDesc:
        """Shape and dtype of one object per layer group of `layout`, for a configured chunk size in tokens."""
        desc = self._descs.get(chunk_size)
        if desc is None:
            plugin = self.layout_plugin
            desc = plugin.object_desc(self.layout, chunk_size) if plugin else canonical_desc(self.layout, chunk_size)
            self._descs[chunk_size] = desc
        return desc

    def check(self, key: CacheKey) -> None:
        """Check that the key names what this instance registered, and one rank. Raises `NamespaceMismatch`."""
        for what, sent, known in (
            ("namespace", key.namespace.hex(), self.namespace.hex()),
            ("model", key.model_name, self.model_name),
            ("world size", key.world_size, self.world_size),
        ):
            if sent != known:
                where = f"key of instance {self.instance_id}"
                raise NamespaceMismatch(f"the {what} is {sent!r}", where=where, available=f"{known!r} as registered")
        if key.worker_id is None or (self.rank is not None and key.worker_id != self.rank):
            fact = f"the worker id is {key.worker_id}"
            available = "one rank" if self.rank is None else f"rank {self.rank} as registered"
            raise NamespaceMismatch(fact, where=f"key of instance {self.instance_id}", available=available)

    def describe(self, chunk_size: int) -> dict[str, object]:
        if not self._description:
            self._description = self._describe(chunk_size)
        failure = self.memory.failure() if self.memory is not None else None
        return {**self._description, "lost": failure.fact if failure else None}

    def _describe(self, chunk_size: int) -> dict[str, object]:
        groups = self.layout.groups
        desc = self.get_layout_desc(chunk_size)
        dtype = ", ".join(dict.fromkeys(group.dtype for group in groups))
        opaque = any(group.packing for group in groups)
        return {
            "instance_id": self.instance_id,
            "session_id": self.session_id,
            "pid": self.pid,
            "model": self.model_name[:MAX_SHOWN],
            "world_size": self.world_size,
            "rank": self.rank,
            "shards": list(self.held),
            "namespace": self.namespace.hex(),
            "transport": self.transport,
            "is_gpu": self.is_gpu,
            "lost": None,
            "layers": sum(group.num_layers for group in groups),
            "block_size": groups[0].block_size // groups[0].compress_ratio,
            "logical_block_size": groups[0].block_size,
            "hidden_sizes": [group.hidden for group in groups],
            "dtype": dtype,
            "model_dtype": self.model_dtype[:MAX_SHOWN] or ("" if opaque else dtype),
            "mla": all(group.planes == 1 and not (group.packing or group.state) for group in groups),
            "num_blocks": self.layout.num_blocks,
            "format": self.layout.format,
            "axes": [group.axes for group in groups],
            "shapes": [group.shape for group in desc.groups],
            "forms": [group.form for group in desc.groups],
            "chunk_tokens": desc.chunk_tokens,
            "bytes_per_token": desc.nbytes / desc.chunk_tokens,
            "group_physical_block_sizes": [group.block_size // group.compress_ratio for group in groups],
            "group_compress_ratios": [group.compress_ratio for group in groups],
        }


def own_context(contexts: Contexts, instance_id: int, client: ClientInfo) -> RegisteredContext:
    """Return the context of an instance that this client registered. Raises `NotRegistered`."""
    context = contexts.get(instance_id)
    if context is None or context.session_id != client.session_id:
        # A snapshot, since pooled handlers of plugins also call this.
        mine = [str(each.instance_id) for each in list(contexts.values()) if each.session_id == client.session_id]
        fact = f"instance {instance_id} is not registered by this client"
        hint = "send REGISTER_KV_CACHE first, and again after the server restarts"
        raise NotRegistered(fact, available=f"the client's instances: {', '.join(mine) or 'none'}", hint=hint)
    return context


def check_own_user(client: ClientInfo, what: str) -> None:
    """Raise `RequestError` unless the client is a process of the server's own user, by the kernel's word for its
    liveness socket. `what` ends the sentence "only ... may"."""
    if _uid(client) != os.geteuid():
        raise RequestError(
            f"only a process of the server's own user may {what}",
            available=f"user {os.geteuid()} on the server's node, over ipc://",
        )


def _uid(client: ClientInfo) -> int | None:
    descriptor = client.liveness_fd() if client.local else None
    if descriptor is None:
        return None
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as peer:
        return peer_of(peer)[1]
    return None
