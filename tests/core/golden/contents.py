"""What is recorded of values in L2 and of names of content: whoever changes one of them makes old values misses."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec

from kvf_hashers import Sha256
from kvframework.api.keys import ObjectKey, compute_namespace, salt_digest
from kvframework.api.layout import GroupDesc, KVLayout, LayerGroup, MemoryLayoutDesc
from kvframework.service.registration import layer_order
from kvframework.storage import namespaces
from kvframework.wire.messages import RegisterNonGpuContextPayload
from kvframework.wire.protocol import non_gpu_namespace
from tests.core.golden.samples import explicit

NAMESPACE = bytes(range(16))
KEY = ObjectKey(NAMESPACE, bytes(range(16, 32)), 3, 1, bytes(range(32, 64)))
DESC = MemoryLayoutDesc(
    256, (GroupDesc((2, 4, 256, 64), "bfloat16"), GroupDesc((1, 2, 16, 4096), "uint8", "opaque:amx", 1024))
)
LAYERS = (("layers.0", "layers.2"), ("layers.1", "layers.10"))
ORDER = layer_order(
    KVLayout("paged", tuple(LayerGroup(len(names), 16, 1, 8, "int8", layer_names=names) for names in LAYERS))
)
RECORD = namespaces.NamespaceRecord("org/model ü", 2, DESC, (namespaces.RankOrder(1, ORDER),), used_at=1 << 30)
OBJECT = bytes(range(64)) * 4
# Zstandard may pack otherwise tomorrow, but has to unpack this.
ZSTD = bytes.fromhex(
    "28b52ffd6400004d02000404000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c"
    "2d2e2f303132333435363738393a3b3c3d3e3f0100406fa0421476a976fa"
)
# Elements of two bytes; both planes are frames.
PLANES = bytes.fromhex(
    "010200000000000000010000000000007c555798671c8157310000003100000028b52ffd2080450100040200020406080a0c0e1012141618"
    "1a1c1e20222426282a2c2e30323436383a3c3e0100e831a92728b52ffd2080450100040201030507090b0d0f11131517191b1d1f21232527"
    "292b2d2f31333537393b3d3f0100e831a927"
)
TOKENS = b"".join(number.to_bytes(4, "little") for number in range(1, 9))
NON_GPU = RegisterNonGpuContextPayload(1, "org/model", 2, 16, 4, 128, "bfloat16", False)


def envelopes() -> dict[str, Any]:
    layout = namespaces.layout_fingerprint(DESC)
    values = [("as it is", "none", OBJECT, layout), ("packed", "zstd", ZSTD, layout), ("empty", "none", b"", bytes(16))]
    values.append(("in planes", "planes", PLANES, layout))
    return {
        "format": namespaces.FORMAT_VERSION,
        "values": [
            {
                "what": what,
                "key": _hex(KEY.pack()),
                "layout": _hex(fingerprint),
                "codec": codec,
                "object": _hex(OBJECT if packed else b""),
                "header": _hex(
                    namespaces.seal(
                        KEY.pack(), [packed], object_bytes=len(OBJECT) if packed else 0, codec=codec, layout=fingerprint
                    )
                ),
                "packed": _hex(packed),
            }
            for what, codec, packed, fingerprint in values
        ],
    }


def namespace_records() -> dict[str, Any]:
    known = namespaces.NamespaceRecords()
    known.add(NAMESPACE, RECORD)
    with mock.patch("time.time", return_value=RECORD.used_at):
        found = known.encoded(NAMESPACE)
    assert found is not None
    key, value = found
    return {
        "namespace": _hex(NAMESPACE),
        "key": _hex(key),
        "value": explicit(RECORD),
        "bytes": len(value),
        "record, then zeros": _hex(bytes(value).rstrip(b"\0")),
    }


def names() -> dict[str, Any]:
    hasher = Sha256()
    return {
        "object key": {
            "value": {name: explicit(part) for name, part in KEY._asdict().items()},
            "key": _hex(KEY.pack()),
        },
        "key of a namespace's record": _hex(namespaces.record_key(NAMESPACE)),
        "layout fingerprint": {"value": explicit(DESC), "fingerprint": _hex(namespaces.layout_fingerprint(DESC))},
        "salt": {
            "value": "a tenant ü",
            "digest": _hex(salt_digest("a tenant ü")),
            "layers": [list(group) for group in LAYERS],
            "order of layers": _hex(ORDER),
            "digest with this order": _hex(salt_digest("a tenant ü", ORDER)),
            "digest of the order alone": _hex(salt_digest("", ORDER)),
        },
        "namespace": {
            "value": explicit(DESC),
            "namespace": _hex(
                compute_namespace(
                    model="org/model",
                    desc=DESC,
                    hasher_fingerprint=hasher.fingerprint,
                    world_size=2,
                    revision="main",
                    quantization="fp8",
                    packing="amx",
                )
            ),
        },
        "namespace of shards": {
            "split": [8, 4, 80, 2],
            "namespace": _hex(
                compute_namespace(
                    model="org/model",
                    desc=DESC,
                    hasher_fingerprint=hasher.fingerprint,
                    world_size=8,
                    split=(8, 4, 80, 2),
                )
            ),
        },
        "namespace of eight fields": {
            "value": explicit(NON_GPU),
            "namespace": _hex(non_gpu_namespace(NON_GPU, hasher.fingerprint, 256)),
        },
        "digests": {
            "hasher": hasher.fingerprint,
            "tokens": _hex(TOKENS),
            "digests of chunks of 4": _hex(hasher.chunk_digests(TOKENS, 4)),
            "with an extra at the second": _hex(hasher.chunk_digests(TOKENS, 4, extras={1: b"lora"})),
        },
    }


def _hex(value: bytes | memoryview) -> str:
    return f"0x{bytes(value).hex()}"


def raw(text: str) -> bytes:
    """The inverse of how bytes are recorded."""
    return bytes.fromhex(text.removeprefix("0x"))


def plain(value: object) -> object:
    """A desc or record as it was recorded, for `msgspec.convert`."""
    return msgspec.json.decode(msgspec.json.encode(value))
