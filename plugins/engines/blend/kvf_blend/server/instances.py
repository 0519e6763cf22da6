"""The rotary parameters of registered instances, and what stands before their segments, kept in the service's own
registry of instances. They end with the instance; they are kept nowhere else.

`attach` and `detach` run on the server's serving thread, `blended` in any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvf_blend.errors import BadRotary, BadSegments, BlendRefused
from kvf_blend.messages import RegisterBlend
from kvf_blend.rotary import Rotary, check, fingerprint
from kvframework.api.keys import TOKEN_BYTES, PackedKey
from kvframework.api.layout import CANONICAL, MemoryLayoutDesc
from kvframework.api.requests import CacheServices, ClientInfo, InstanceContext
from kvframework.errors import AlreadyRegistered, MessageTooLarge, NamespaceMismatch, NotRegistered

# The most objects of one request, as in the core.
MAX_OBJECTS = 1 << 15


class Objects:
    """The objects of chunks, given the prefixes of their keys (`CacheServices.key_prefixes`). Keys are digest by
    digest, in each rank by rank."""

    def __init__(self, prefixes: Sequence[bytes]) -> None:
        self._prefixes = prefixes

    @property
    def most_digests(self) -> int:
        """The most chunks that one request may name."""
        return MAX_OBJECTS // len(self._prefixes)

    def check(self, digests: int) -> None:
        """Raise `MessageTooLarge` for more chunks than one request may name."""
        if digests > self.most_digests:
            raise MessageTooLarge(
                f"the request has {digests} chunks of {len(self._prefixes)} ranks and layer groups",
                available=f"at most {MAX_OBJECTS} objects a request",
                hint="give fewer segments at once",
            )

    def keys(self, digests: Iterable[bytes]) -> list[PackedKey]:
        return [prefix + digest for digest in digests for prefix in self._prefixes]

    def whole(self, digests: Sequence[bytes], available: Sequence[bool]) -> set[bytes]:
        """The digests all of whose objects are available, given which of `keys(digests)` are."""
        rows = len(self._prefixes)
        return {digest for index, digest in enumerate(digests) if all(available[index * rows : (index + 1) * rows])}

    def indices(self, positions: Iterable[int]) -> list[int]:
        """The indices in `keys(digests)` of the objects of the digests at `positions`."""
        rows = len(self._prefixes)
        return [position * rows + row for position in positions for row in range(rows)]


_ATTACHED = "blend"
# The dtypes in which keys can be rotated.
_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Attached:
    """What an instance has said of its blending; `before` are packed tokens."""

    rotary: Rotary
    before: bytes = b""


@dataclass(frozen=True)
class Blended:
    """An instance with rotary parameters, as the handlers see it. Its segments are computed from position
    `before_tokens`."""

    context: InstanceContext
    desc: MemoryLayoutDesc
    fingerprint: bytes
    before_tokens: int

    @property
    def chunk_tokens(self) -> int:
        return self.desc.chunk_tokens

    def objects(self, services: CacheServices, cache_salt: str, *, all_ranks: bool = False) -> Objects:
        """Of the instance's ranks, or of all."""
        context = self.context
        ranks = range(context.world_size) if all_ranks else context.ranks
        return Objects(services.key_prefixes(context.namespace, cache_salt, ranks))


def attach(services: CacheServices, client: ClientInfo, payload: RegisterBlend) -> Blended:
    """Add rotary parameters to one of the client's instances; the same ones again are no error.

    Raises `NotRegistered`, `NamespaceMismatch` for another model or world size than registered, `BlendRefused`,
    `BadRotary`, `BadSegments`, and `AlreadyRegistered` for other parameters than before.
    """
    context = services.instance(payload.instance_id, client)
    sent, known = (payload.model_name, payload.world_size), (context.model_name, context.world_size)
    if sent != known:
        raise NamespaceMismatch(
            f"the request names model {sent[0]!r}, world size {sent[1]}",
            where=f"instance {context.instance_id}",
            available=f"model {known[0]!r}, world size {known[1]} as registered",
        )
    _check_layout(context, context.get_layout_desc(services.chunk_size))
    check(payload.rotary)
    _check_head(context, payload.rotary)
    if len(payload.before) % TOKEN_BYTES:
        raise BadSegments(
            f"`before` has {len(payload.before)} bytes", where="before", available=f"{TOKEN_BYTES} bytes a token id"
        )
    given = Attached(payload.rotary, payload.before)
    if context.attached.setdefault(_ATTACHED, given) != given:
        raise AlreadyRegistered(
            f"instance {context.instance_id} has other rotary parameters, or other tokens before its segments",
            hint="send CB_UNREGISTER_KV_CACHE first",
        )
    return blended(services, payload.instance_id, client)


def detach(services: CacheServices, client: ClientInfo, instance_id: int) -> None:
    """Remove the parameters. Raises `NotRegistered` if there are none."""
    context = blended(services, instance_id, client).context
    del context.attached[_ATTACHED]


def blended(services: CacheServices, instance_id: int, client: ClientInfo | None = None) -> Blended:
    """A registered instance with rotary parameters; if `client` is given, one of this client's. Raises
    `NotRegistered`."""
    context = services.instance(instance_id, client)
    attached = context.attached.get(_ATTACHED)
    if not isinstance(attached, Attached):
        raise NotRegistered(
            f"instance {instance_id} has registered no rotary parameters",
            hint="send CB_REGISTER_KV_CACHE, and again after the server restarts",
        )
    return Blended(
        context,
        context.get_layout_desc(services.chunk_size),
        fingerprint(attached.rotary, attached.before),
        len(attached.before) // TOKEN_BYTES,
    )


def _check_layout(context: InstanceContext, desc: MemoryLayoutDesc) -> None:
    """Check that the layout keeps every token's keys, in their own form, for the whole of a segment."""
    for index, (group, stored) in enumerate(zip(context.layout.groups, desc.groups, strict=True)):
        found = ""
        if group.state or group.window:
            found = "a recurrent state" if group.state else f"a window of {group.window} tokens"
        elif group.packing or stored.form != CANONICAL:
            found = f"objects in the form {stored.form!r}"
        elif group.compress_ratio != 1:
            found = f"slots of {group.compress_ratio} tokens"
        elif group.dtype not in _DTYPES:
            found = f"dtype {group.dtype}"
        if found:
            raise BlendRefused(
                found,
                where=f"layer group {index} of instance {context.instance_id}",
                available=f"keys of every token, in canonical form, as {', '.join(_DTYPES)}",
            )


def _check_head(context: InstanceContext, rotary: Rotary) -> None:
    """Check that all groups with keys and values have heads of this size. Of those with one plane (MLA, or keys and
    values of unequal size) only one holds the rotated part."""
    groups = context.layout.groups
    fits = {index: group.hidden % rotary.head_dim == 0 for index, group in enumerate(groups)}
    if not all(fits[index] for index, group in enumerate(groups) if group.planes == 2) or not any(fits.values()):
        raise BadRotary(
            f"head_dim is {rotary.head_dim}",
            where="rotary.head_dim",
            available=f"a divisor of {', '.join(str(group.hidden) for group in groups)}, the elements of one token",
            hint="take the parameters from the model's configuration",
        )
