"""The chained digests of one request, which hash each token once, and the grants of its lookup for loads."""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, KeyHasher
from kvframework.api.installing import load_library
from kvframework.api.keys import CacheKey, ChunkContent, Extra, Image, Retain, sampled_parent
from kvframework.api.transport import ArenaRange, LoadGrant, Transfer
from kvframework.errors import BadRange, ProtocolError, RequestError
from kvframework.wire import messages as m
from kvframework.wire.transfer_blocks import unpack_indices, unpack_offsets

log = logging.getLogger(__name__)

_LIBRARY = Path(__file__).with_name("native") / "libkvf_token_ids.so"
_ABI = 1
# Below this, the call costs more than it saves.
_FEW = 512

# (a list, room for as many integers) -> how many of its first items were packed: the rest it cannot judge.
_Pack = Callable[[list[int], "array.array[int]"], int]


def packed_behind(rest: array.array[int], token_ids: Sequence[int]) -> array.array[int]:
    """Return `rest`, an array of u32, with the ids behind it, as a new array: by the token kernel, an optional part of
    the build, or by `array.fromlist`, which takes five times as long. Raises `OverflowError` for an id that is no u32,
    `TypeError` for what is no integer."""
    if type(token_ids) is list and len(token_ids) >= _FEW and (pack := _kernel()) is not None:
        room = array.array("I", [0]) * len(token_ids)
        if pack(token_ids, room) == len(room) == len(token_ids):
            return rest + room if rest else room
    tokens = rest[:]
    # Lists are packed three times as fast as other sequences.
    tokens.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
    return tokens


@functools.cache
def _kernel() -> _Pack | None:
    """Return the kernel (`native/token_ids.c`), None if it was not built or does not know these integers."""
    # Integers have their count of digits at byte 16 and digits of 30 bits from byte 24 on, and lists the address of
    # their items there. Debug builds and those without a GIL have larger objects.
    if not (
        sys.implementation.name == "cpython"
        and (3, 10) <= sys.version_info < (3, 15)
        and sys.maxsize > 1 << 32
        and sys.byteorder == "little"
        and (sys.int_info.bits_per_digit, sys.int_info.sizeof_digit) == (30, 4)
        and object.__basicsize__ == 16
    ):
        return None
    # With the GIL: the list must not change meanwhile.
    library = load_library(_LIBRARY, "kvf_token_ids", _ABI, instead="Python code packs token ids", load=ctypes.PyDLL)
    if library is None:
        return None
    pack = _pack_by(library)
    if not _is_right(pack):
        log.warning("%s cannot read this interpreter's integers; Python code packs token ids instead", _LIBRARY)
        return None
    return pack


def _pack_by(library: ctypes.CDLL) -> _Pack:
    call = library.kvf_token_ids_pack
    call.argtypes = (ctypes.py_object, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)
    call.restype = ctypes.c_uint64
    zero, small, large = (ctypes.c_uint64.from_address(id(each) + object.__basicsize__).value for each in (0, 5, 1000))
    # Since Python 3.14 the small ones that it keeps have a bit more.
    ignored = small ^ large
    # `form` of the kernel: the type, the bits to ignore, and the tags of integers of one digit and of zero.
    form = (ctypes.c_uint64 * 4)(id(int), ignored, large & ~ignored, zero & ~ignored)
    address = ctypes.addressof(form)

    def pack(token_ids: list[int], room: array.array[int], _held: object = form) -> int:
        return int(call(token_ids, len(room), room.buffer_info()[0], address))

    return pack


def _is_right(pack: _Pack) -> bool:
    """Return whether the kernel reads what it should, and refuses the rest."""
    good = [0, 1, 5, 256, 257, 1000, 128_000, (1 << 30) - 1]
    room = array.array("I", [7]) * len(good)
    if pack(good, room) != len(good) or room.tolist() != good:
        return False
    others: list[object] = [-1, -5, -1000, 1 << 30, 1 << 32, -(1 << 40), 1 << 90, True, False, 1.0, "1", None]
    return not any(pack([other], room) for other in others)  # type: ignore[list-item]


class Grants:
    """A lookup's grants for loads of its hit that no load has taken yet. A grant ends once: a load takes it, in this
    process or another, or freeing the lookup returns it. Thread-safe."""

    def __init__(self, grants: Iterable[LoadGrant] = ()) -> None:
        self._of = {each.instance_id: each for each in grants}

    def add(self, grants: Iterable[LoadGrant]) -> None:
        self._of.update((each.instance_id, each) for each in grants)

    def take(self, instance_id: int, start: int, end: int) -> LoadGrant | None:
        """Return the grant for the load of these tokens by this instance, None if there is none (any more)."""
        grant = self._of.get(instance_id)
        if grant is None or (grant.start, grant.end) != (start, end):
            return None
        return self._of.pop(instance_id, None)

    def take_all(self) -> tuple[LoadGrant, ...]:
        """Return the grants of all instances."""
        taken = (self._of.pop(instance_id, None) for instance_id in list(self._of))
        return tuple(each for each in taken if each is not None)


def content_name(digests: bytes, cache_salt: str) -> bytes:
    """Return a name of the prompt up to the last of these chunks: 32 bytes that do not tell the salt."""
    return hashlib.sha256(digests[-DIGEST_BYTES:] + cache_salt.encode()).digest()


def grants_of(
    reply: m.LookupReply, key: CacheKey, chunk_tokens: int, boot_id: bytes, began: float
) -> Iterable[LoadGrant]:
    """Return the grants in an answer about the tokens of `key`, to a request that was sent at `began`."""
    start, end, until = key.start, key.start + reply.hit_tokens, began + reply.lease_s
    content = content_name(key.digests[: end // chunk_tokens * DIGEST_BYTES], key.cache_salt)
    return [
        LoadGrant(each.instance_id, each.lease, start, end, content, each.offsets, each.objects, boot_id, began, until)
        for each in reply.grants
    ]


def granted_ranges(transfer: Transfer, grant: LoadGrant) -> tuple[ArenaRange, ...]:
    """Return the ranges of a grant for a transfer of the same tokens. Raises `ProtocolError` and `InvalidPayload`."""
    offsets = unpack_offsets(grant.offsets, where="offsets")
    objects = unpack_indices(grant.objects, where="objects") or range(len(offsets))
    if len(objects) != len(offsets):
        raise ProtocolError(f"the server granted {len(offsets)} ranges", available=f"{len(objects)} objects")
    sizes = [group.nbytes for group in transfer.registration.desc.groups]
    groups = len(sizes)
    return tuple(
        ArenaRange(index // groups, index % groups, offset, sizes[index % groups])
        for index, offset in zip(objects, offsets, strict=True)
    )


class RequestHashes:
    """Chained chunk digests of one request's tokens, extended as tokens arrive. For one thread at a time.

    `digests` are the digests of its first whole chunks, extras included, if another process computed them. `trace` is
    the request's `traceparent` header: of a sampled request the server records spans. `retain` is the hint for its KV
    (`kvframework.api.keys.retain_of`), `conversation` the name of its conversation, see `CacheKey`. With `keep_tokens`,
    for a server that wants them (`KVClient.wants_tokens`), the object keeps the tokens, 4 bytes each, and sends them
    with stores and loads, for routers. `lora_name` is the adapter's name for routers. `grants` are the last lookup's
    grants for loads, from this process or another, see `LookupResult.take_grants`."""

    def __init__(
        self,
        hasher: KeyHasher,
        chunk_tokens: int,
        *,
        request_id: str,
        cache_salt: str = "",
        digests: bytes = b"",
        trace: str = "",
        retain: Sequence[Retain] = (),
        conversation: str = "",
        keep_tokens: bool = False,
        lora_name: str = "",
        grants: Sequence[LoadGrant] = (),
    ) -> None:
        self.grants = Grants(grants)
        self.request_id = request_id
        self.cache_salt = cache_salt
        self.trace = sampled_parent(trace) if trace else ""
        self.retain = tuple(retain)
        self.conversation = conversation
        self.chunk_tokens = chunk_tokens
        self._hasher = hasher
        self._digests = bytearray(digests)
        self._rest = array.array("I")
        self._made_elsewhere = len(digests) // DIGEST_BYTES
        self._lora_name = lora_name
        self._kept = array.array("I") if keep_tokens and not digests else None
        self._contents: dict[tuple[int, int], ChunkContent] = {}
        # The bytes folded in, by chunk; also those of chunks that are not whole yet.
        self._extras: dict[int, bytes] = {}

    @property
    def _hashed_chunks(self) -> int:
        return len(self._digests) // DIGEST_BYTES

    @property
    def hashed_tokens(self) -> int:
        """The number of tokens in whole chunks so far."""
        return self._hashed_chunks * self.chunk_tokens

    def extend(self, token_ids: Sequence[int], extras: Mapping[int, bytes] | None = None) -> None:
        """Append tokens. `extras` maps chunk indices of the request to bytes folded in there (LoRA, multimodal and
        embedding digests): given before the chunk's last token, or with it, and perhaps again later. An error changes
        nothing: `RequestError` for an extra that is too late, differs from the one its chunk already has, or belongs to
        no chunk; `OverflowError` for an id that is no u32; any error of the hasher."""
        added = self._checked(extras or {})
        tokens = packed_behind(self._rest, token_ids)
        whole = len(tokens) // self.chunk_tokens * self.chunk_tokens
        if whole:
            self._digests += self._hashed(tokens, whole, {**self._extras, **added})
        self._extras.update(added)
        if self._kept is not None:
            self._kept += tokens[len(self._rest) :]
        self._rest = tokens[whole:]

    def digests(self, end: int) -> bytes:
        """Return the packed digests of the chunks before `end`. Raises `BadRange` for no hashed boundary."""
        if end % self.chunk_tokens or not 0 <= end <= self.hashed_tokens:
            available = f"a multiple of {self.chunk_tokens}, at most the {self.hashed_tokens} tokens that are hashed"
            raise BadRange(f"end is {end}", where=f"request {self.request_id!r}", available=available)
        return bytes(self._digests[: end // self.chunk_tokens * DIGEST_BYTES])

    def key(
        self, model_name: str, namespace: bytes, start: int, end: int, world_size: int, worker_id: int | None = None
    ) -> CacheKey:
        """Return the cache key of tokens `[start, end)`, for all ranks or one. Raises `BadRange` as `digests` does."""
        digests, salt = self.digests(end), self.cache_salt
        return CacheKey(
            model_name,
            world_size,
            worker_id,
            namespace,
            start,
            end,
            self.request_id,
            digests=digests,
            cache_salt=salt,
            trace=self.trace,
            retain=self.retain,
            conversation=self.conversation,
        )

    def content(
        self, start: int, end: int, *, block_size: int = 0, hashes: bytes = b"", images: Sequence[Image] = ()
    ) -> ChunkContent | None:
        """Return the content of tokens `[start, end)`, whole chunks, for the server; None if its tokens are not kept.
        For `block_size`, `hashes` and `images` see `ChunkContent`."""
        if self._kept is None:
            return self._contents.get((start, end))
        tokens = self._kept[start:end]
        if len(tokens) < end - start:
            return None
        if sys.byteorder == "big":
            tokens.byteswap()
        here = range(start // self.chunk_tokens, end // self.chunk_tokens)
        extras = [Extra(index - here.start, extra) for index, extra in self._extras.items() if index in here]
        return ChunkContent(tokens.tobytes(), tuple(extras), block_size, hashes, tuple(images), self._lora_name)

    def bring(self, start: int, end: int, content: ChunkContent) -> None:
        """Keep the content of tokens `[start, end)` from another process, to go along with their store or load."""
        self._contents[start, end] = content

    def _checked(self, extras: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the extras that are new."""
        added, where = {}, f"request {self.request_id}"
        for index, extra in extras.items():
            if index < 0:
                raise RequestError(f"an extra names chunk {index}", available="0 or more, counted from the first chunk")
            if index < self._made_elsewhere or extra == self._extras.get(index, b""):
                continue
            if index in self._extras:
                hint = "join all extras of one chunk into one"
                raise RequestError(f"chunk {index} has two different extras", where=where, available="one", hint=hint)
            if index < self._hashed_chunks:
                raise RequestError(
                    f"an extra names chunk {index}, which is already hashed without it",
                    where=where,
                    available=f"chunk {self._hashed_chunks} or later",
                    hint="give extras before their chunk's last token",
                )
            added[index] = bytes(extra)
        return added

    def _hashed(self, tokens: array.array[int], whole: int, extras: Mapping[int, bytes]) -> bytes:
        done = self._hashed_chunks
        here = range(done, done + whole // self.chunk_tokens)
        folded = {index - done: extra for index, extra in extras.items() if index in here}
        if sys.byteorder == "big":
            tokens = tokens[:]
            tokens.byteswap()
        parent = bytes(self._digests[-DIGEST_BYTES:])
        packed = memoryview(tokens).cast("B")[: whole * TOKEN_BYTES]
        return self._hasher.chunk_digests(packed, self.chunk_tokens, parent=parent, extras=folded)
