"""What L2 holds: values, each under an envelope, and a record of the facts about each namespace: model, world size,
object layout, order of layers.

**An envelope** is a fixed header, 80 bytes, little-endian, before the object's bytes as its codec packed them: magic
`KVFO`, format version u16, 2 reserved bytes (zero), namespace 16, layout desc 16 (`layout_fingerprint`, zero if
unknown), codec name 16 (ASCII, zero padded), bytes of the object u64, bytes that follow u64, XXH3-64 u64. The checksum
covers the packed object key, the header before the checksum, and the bytes that follow, so that a value under the wrong
key is detected like a flipped bit.

**A record** lets a scheduler look up a prompt before any worker has registered. It has a fixed length, so that it can
be read like an object: u32 length, msgpack, zero padded to 8 KiB, under a key that no object can have."""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

import msgspec
import xxhash
from msgspec import Meta

from kvframework.api.codec import MAX_CODEC_NAME, NO_CODEC
from kvframework.api.copying import joined
from kvframework.api.keys import LAYER_ORDER_BYTES, ObjectKey, PackedKey
from kvframework.api.layout import CANONICAL, MAX_GROUPS, MAX_OBJECT_BYTES, MemoryLayoutDesc
from kvframework.api.plugin import Buffer, Message
from kvframework.api.toml import closest
from kvframework.errors import BadDtype, NamespaceMismatch, RequestError

FORMAT_VERSION = 2
UNKNOWN_LAYOUT = bytes(16)

_MAGIC = b"KVFO"
_FIELDS = struct.Struct("<4sHH16s16s16sQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
# Where the header has the layout.
LAYOUT = slice(24, 40)


class Damaged(ValueError):
    """The bytes read are not those that were stored under this key."""


def layout_fingerprint(desc: MemoryLayoutDesc) -> bytes:
    """16 bytes that identify the layout of a namespace's objects: XXH3-128 of the fields of `desc`."""
    groups = [f"{group.form} {group.dtype} {group.shape} {group.window}" for group in desc.groups]
    return xxhash.xxh3_128_digest("\n".join([str(desc.chunk_tokens), *groups]).encode())


def checksum_in(header: bytes) -> int:
    return int(_CHECKSUM.unpack_from(header, _FIELDS.size)[0])


def object_checksum(key: PackedKey, value: memoryview, layout: bytes) -> int:
    """Return the checksum that `seal` writes for an object that no codec packs."""
    return checksum_in(seal(key, [value], object_bytes=value.nbytes, layout=layout))


def seal(
    key: PackedKey,
    packed: Sequence[Buffer],
    *,
    object_bytes: int,
    codec: str = NO_CODEC,
    layout: bytes = UNKNOWN_LAYOUT,
) -> bytes:
    size = sum([memoryview(part).nbytes for part in packed])
    name = codec.encode("ascii").ljust(MAX_CODEC_NAME, b"\0")
    fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, 0, key[:16], layout, name, object_bytes, size)
    return fields + _CHECKSUM.pack(_checksum(key, fields, packed))


def unseal(
    header: Buffer,
    key: PackedKey,
    place: memoryview,
    tail: Buffer = b"",
    *,
    received: int,
    layout: bytes = UNKNOWN_LAYOUT,
) -> tuple[str, memoryview]:
    """Return the codec's name, and the beginning of `place` that holds the packed bytes, or a copy of longer ones.
    `received` bytes of the value were read into header, place and tail together; bytes behind them are from earlier
    use. `place` is as long as the object. Raises `Damaged`."""
    if memoryview(header).nbytes != HEADER_BYTES or received < HEADER_BYTES:
        raise Damaged("the value has no header of kvframework")
    fields = bytes(header)[: _FIELDS.size]
    magic, version, reserved, namespace, written, name, object_bytes, size = _FIELDS.unpack(fields)
    if magic != _MAGIC:
        raise Damaged("the value has no header of kvframework")
    if version != FORMAT_VERSION or reserved:
        raise Damaged(f"the value has format version {version}, expected {FORMAT_VERSION}")
    if namespace != key[:16]:
        raise Damaged("the value is of another namespace")
    if UNKNOWN_LAYOUT not in (written, layout) and written != layout:
        raise Damaged("the value is of another object layout")
    if object_bytes != place.nbytes or size > place.nbytes + len(tail):
        raise Damaged(f"the object has {object_bytes} bytes, packed into {size}, expected {place.nbytes}")
    if received != HEADER_BYTES + size:
        raise Damaged(f"the value has {received - HEADER_BYTES} of {size} bytes after its header")
    packed = place[:size] if size <= place.nbytes else joined([place, tail[: size - place.nbytes]])
    if _CHECKSUM.unpack_from(header, _FIELDS.size)[0] != _checksum(key, fields, [packed]):
        raise Damaged("the value has a wrong checksum")
    codec = name.rstrip(b"\0").decode("ascii", "replace")
    if codec == NO_CODEC and size != object_bytes:
        raise Damaged(f"the value has {size} bytes, expected {object_bytes}")
    return codec, packed


def _checksum(key: PackedKey, fields: bytes, packed: Sequence[Buffer]) -> int:
    digest = xxhash.xxh3_64(key)
    digest.update(fields)
    for part in packed:
        digest.update(part)
    return digest.intdigest()


RECORD_BYTES = 8192
MAX_NAMESPACES = 4096
# Leaves room for a model's name and many layer groups.
MAX_ORDERS = 64
_SALT = b"kvf/namespace/1\0"
_RANK = 0xFFFFFFFF
_OF_RECORD = _SALT + _RANK.to_bytes(4, "little")
_NATURAL: Mapping[int, bytes] = {}


class RankOrder(Message, frozen=True):
    """The order in which one rank's objects hold their layers, where it differs from the order of names, see
    `kvframework.service.registration`. 16 bytes."""

    rank: int
    order: bytes


class NamespaceRecord(Message, frozen=True):
    """A namespace's record. `orders` are those of the ranks seen, `MAX_ORDERS` at most. `used_at` is when a server with
    an engine of the namespace wrote it, in Unix seconds; 0: an older release did."""

    model_name: str
    world_size: int
    desc: MemoryLayoutDesc
    orders: Annotated[tuple[RankOrder, ...], Meta(max_length=MAX_ORDERS)] = ()
    used_at: int = 0

    @property
    def meaning(self) -> tuple[str, int, MemoryLayoutDesc]:
        """The facts that are equal for all ranks of a namespace."""
        return self.model_name, self.world_size, self.desc


class RecordJournal(Protocol):
    """Where the records are kept for the next server; called under the lock of the records."""

    def record(self, namespace: bytes, value: bytes, *, learned: bool) -> None: ...

    def forget(self, namespace: bytes) -> None: ...


class NamespaceRecords:
    """Thread-safe. When there are too many records, the one with the oldest registration is forgotten, except those
    that are retained: a client that registers many cannot keep others from hits."""

    def __init__(self) -> None:
        self._records: dict[bytes, NamespaceRecord] = {}
        # Fingerprints of the namespaces' layouts.
        self._fingerprints: dict[bytes, bytes] = {}
        # By rank; b"" is left out. The inner maps are never changed, so they are read without the lock.
        self._orders: dict[bytes, Mapping[int, bytes]] = {}
        self._learned: set[bytes] = set()
        self._retained: Counter[bytes] = Counter()
        self._journal: RecordJournal | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    def keep_in(self, journal: RecordJournal) -> None:
        """Record all that is known and each change, from now on, in a journal."""
        with self._lock:
            self._journal = journal
            for namespace in self._records:
                self._keep(namespace)

    def get(self, namespace: bytes) -> NamespaceRecord | None:
        with self._lock:
            return self._records.get(namespace)

    def model_of(self, namespace: bytes) -> str:
        """Return the name of its model, "" if it is not known."""
        record = self.get(namespace)
        return "" if record is None else record.model_name

    def orders(self, namespace: bytes) -> Mapping[int, bytes]:
        """Return, by rank, the order of its layers, where it differs from the order of their names."""
        return self._orders.get(namespace, _NATURAL)

    def order(self, namespace: bytes, rank: int | None, order: bytes) -> None:
        """Set the order of layers of a rank (None: all) of a known namespace. Objects in another one are not found."""
        with self._lock:
            orders = {} if rank is None else {**self.orders(namespace), rank: order}
            self._orders[namespace] = {rank: order for rank, order in orders.items() if order}
            self._keep(namespace)

    def add(self, namespace: bytes, record: NamespaceRecord, *, learned: bool = False) -> None:
        """Add a record. Raises `NamespaceMismatch` for another meaning of a known one, `RequestError` for a long one.
        `learned` means that the record came from L2, where any client may write: a registration overrides it."""
        with self._lock:
            known = self._records.get(namespace)
            doubtful = namespace in self._learned
            same = known is not None and known.meaning == record.meaning
            if known is not None and learned and (doubtful or same):
                return
            if known is not None and not same and not doubtful:
                raise NamespaceMismatch(
                    f"namespace {namespace.hex()} is known as {known.model_name!r}, world size {known.world_size}, "
                    f"shapes {[group.shape for group in known.desc.groups]}",
                    available="one description per namespace",
                    hint="call kvframework.api.keys.compute_namespace with everything that differs",
                )
            if len(_encoded(record)) > RECORD_BYTES:
                raise RequestError("the description of the namespace is too long", hint="use a shorter model name")
            self._records.pop(namespace, None)
            if len(self._records) >= MAX_NAMESPACES:
                oldest = next((each for each in self._records if each not in self._retained), next(iter(self._records)))
                del self._records[oldest], self._fingerprints[oldest], self._orders[oldest]
                self._learned.discard(oldest)
                if self._journal is not None:
                    self._journal.forget(oldest)
            (self._learned.add if learned else self._learned.discard)(namespace)
            self._records[namespace] = record
            if learned or not same:
                self._orders[namespace] = {each.rank: each.order for each in record.orders}
            self._fingerprints[namespace] = layout_fingerprint(record.desc)
            if not same or learned != doubtful:
                self._keep(namespace)

    def models(self) -> dict[str, set[bytes]]:
        found: dict[str, set[bytes]] = {}
        with self._lock:
            for namespace, record in self._records.items():
                found.setdefault(record.model_name, set()).add(namespace)
        return found

    def of_model(self, model: str) -> set[bytes]:
        """Return the known namespaces of a model. Raises `RequestError` if there are none."""
        models = self.models()
        if model not in models:
            fact = f"the model {model!r} is unknown to this server"
            raise RequestError(fact, available=", ".join(sorted(models)) or "no model", hint=closest(model, models))
        return models[model]

    def retain(self, namespace: bytes) -> None:
        """Keep the record of a registered instance's namespace until `release`."""
        with self._lock:
            self._retained[namespace] += 1

    def release(self, namespace: bytes) -> None:
        with self._lock:
            self._retained[namespace] -= 1
            if not self._retained[namespace]:
                del self._retained[namespace]

    def retained(self) -> list[bytes]:
        """Return the namespaces of registered instances."""
        with self._lock:
            return list(self._retained)

    def layout_of(self, namespace: bytes) -> bytes:
        """Return the fingerprint of the namespace's object layout, `UNKNOWN_LAYOUT` if it is not known."""
        return self._fingerprints.get(namespace, UNKNOWN_LAYOUT)

    def dtype_of(self, key: PackedKey) -> str:
        """Return the dtype of the elements of an object, "" where it is not known: of an engine's own packing, of a
        layer group without a declaration, and of a record."""
        record = self.get(key[:16])
        group = ObjectKey.unpack(key).group
        if record is None or is_record_key(key) or group >= len(record.desc.groups):
            return ""
        desc = record.desc.groups[group]
        return desc.dtype if desc.form == CANONICAL else ""

    def encoded(self, namespace: bytes) -> tuple[PackedKey, memoryview] | None:
        """Return key and value of the record in L2, None for an unknown namespace."""
        record = self.get(namespace)
        return None if record is None else (record_key(namespace), memoryview(self._value(namespace, record)))

    def _keep(self, namespace: bytes) -> None:
        record = self._records.get(namespace)
        if self._journal is not None and record is not None:
            learned = namespace in self._learned
            self._journal.record(namespace, self._value(namespace, record), learned=learned)

    def _value(self, namespace: bytes, record: NamespaceRecord) -> bytes:
        orders = [RankOrder(rank, order) for rank, order in sorted(self.orders(namespace).items())]
        used_at = int(time.time())
        value = _encoded(msgspec.structs.replace(record, orders=tuple(orders[:MAX_ORDERS]), used_at=used_at))
        if len(value) > RECORD_BYTES:
            # Ranks in another order are then found once they are registered.
            value = _encoded(msgspec.structs.replace(record, orders=(), used_at=used_at))
        return value


def record_key(namespace: bytes) -> PackedKey:
    return ObjectKey(namespace, _SALT, _RANK, 0, bytes(32)).pack()


def is_record_key(key: PackedKey) -> bool:
    return key[16:36] == _OF_RECORD


def decode_record(value: bytes) -> NamespaceRecord | None:
    """Decode a record; None if the bytes are no record or describe impossible objects (a miss)."""
    length = int.from_bytes(value[:4], "little")
    try:
        record = msgspec.msgpack.decode(value[4 : 4 + length], type=NamespaceRecord)
        return record if _plausible(record) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, BadDtype):
        return None


def _plausible(record: NamespaceRecord) -> bool:
    groups, ranks = record.desc.groups, [each.rank for each in record.orders]
    return (
        min(record.world_size, record.desc.chunk_tokens) >= 1
        and 1 <= len(groups) <= MAX_GROUPS
        and all(min(each.shape, default=0) >= 1 and each.window >= 0 for each in groups)
        and all(each.nbytes <= MAX_OBJECT_BYTES for each in groups)
        and all(0 <= rank < record.world_size for rank in ranks)
        and len(set(ranks)) == len(ranks)
        and all(len(each.order) == LAYER_ORDER_BYTES for each in record.orders)
    )


def _encoded(record: NamespaceRecord) -> bytes:
    packed = msgspec.msgpack.encode(record)
    return (len(packed).to_bytes(4, "little") + packed).ljust(RECORD_BYTES, b"\0")
