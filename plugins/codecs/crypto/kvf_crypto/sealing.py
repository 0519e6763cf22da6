"""The form of a sealed value, and the ciphers: what is sealed is encrypted and bound to its name. Pure.

**The form**, before the ciphertext and its tag of 16 bytes, 44 bytes, little-endian: magic `KVA1`, cipher u8 (1
AES-256-GCM, 2 ChaCha20-Poly1305), packing u8 (0 none, 1 Zstandard), 2 reserved bytes (zero), generation u32, key id 8,
random 24. The associated data is all of this, then the object's key (namespace, salt, rank, group, digest), its layout,
the object's length u64, and the tenant's name. So a value that was changed, that lies under another name, that is
another tenant's or another generation's, or whose form claims something else, has a wrong tag.

**Nonces do not repeat**, and no node, clock or counter has to see to it. Each value has 24 fresh bytes from the kernel:
the first 12 derive, by HKDF-SHA256 from the tenant's data key, a key for this value, and the last 12 are the nonce
under it (the construction of XAES-256-GCM, with HKDF for the derivation). A pair repeats only if all 192 bits do. After
2^64 values under one data key (a million a second on each of a thousand nodes, for 580 years) that has happened with a
probability of 2^-65. A counter would be shorter, but a restored snapshot of a machine, a fork or a copied disk repeats
it; a clock jumps; a number of the node is given twice by mistake. The kernel's generator is seeded anew in a child, and
in a virtual machine that tells its guest that it was cloned. Plain 96-bit nonces would need a new key after 2^32
values, some days of a large fleet.

`MOST_VALUES` bounds what one process seals under one data key all the same, far before the bound of forged tags
(2^-60 after 2^48 values of 1 GiB at most), and `kvframework crypto rotate` begins anew.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from kvframework.api.codec import MAX_OVERHEAD, ValueName, ValueRefused
from kvframework.api.copying import fresh_memory

SECRET_BYTES = 32
KEY_ID_BYTES = 8
RANDOM_BYTES = 24
TAG_BYTES = 16
MOST_VALUES = 1 << 48

CIPHERS = {"aes-256-gcm": 1, "chacha20-poly1305": 2}
_MAKERS = {1: AESGCM, 2: ChaCha20Poly1305}
_HEAD = struct.Struct(f"<4sBBHI{KEY_ID_BYTES}s{RANDOM_BYTES}s")
_MAGIC = b"KVA1"
HEAD_BYTES = _HEAD.size
assert HEAD_BYTES + TAG_BYTES <= MAX_OVERHEAD


class DataKey(NamedTuple):
    """The key of one tenant's values in one generation. `secret` is 32 bytes, `key_id` names it and tells nothing."""

    generation: int
    key_id: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"DataKey(generation={self.generation})"

    @classmethod
    def derive(cls, secret: bytes, tenant: str, generation: int) -> DataKey:
        """The data key of a tenant, from the keyring's secret, which is its own or the deployment's."""
        of = tenant.encode()
        return cls(
            generation, _expand(secret, b"kvf key id 1\0" + of)[:KEY_ID_BYTES], _expand(secret, b"kvf data 1\0" + of)
        )


class Head(NamedTuple):
    """What the form of a sealed value says before it is opened. All of it is as forged as its writer likes."""

    cipher: int
    packing: int
    generation: int
    key_id: bytes
    random: bytes

    @classmethod
    def of(cls, sealed: memoryview) -> Head:
        """Raises `ValueRefused` for another form."""
        if sealed.nbytes < HEAD_BYTES + TAG_BYTES:
            raise ValueRefused("forged", f"it has {sealed.nbytes} bytes, fewer than any sealed value")
        magic, cipher, packing, reserved, *rest = _HEAD.unpack_from(sealed)
        if magic != _MAGIC or reserved or cipher not in _MAKERS or packing > 1:
            raise ValueRefused("forged", "it is not in the form of a sealed value")
        return cls(cipher, packing, *rest)


def seal(
    key: DataKey, name: ValueName, data: memoryview, *, cipher: int, packing: int, object_bytes: int
) -> memoryview:
    """Return the sealed form of `data`, the packed bytes of an object with `object_bytes`."""
    random = os.urandom(RANDOM_BYTES)
    head = _HEAD.pack(_MAGIC, cipher, packing, 0, key.generation, key.key_id, random)
    sealed = fresh_memory(HEAD_BYTES + data.nbytes + TAG_BYTES)
    sealed[:HEAD_BYTES] = head
    about = _about(head, name, object_bytes)
    _cipher(key, cipher, random).encrypt_into(random[12:], data, about, sealed[HEAD_BYTES:])
    return sealed


def unseal(key: DataKey, name: ValueName, sealed: memoryview, out: memoryview, *, object_bytes: int) -> None:
    """Fill `out`, which is as long as what was sealed. Raises `ValueRefused` if this is not what was sealed under the
    name; `out` then holds nothing to rely on."""
    head = Head.of(sealed)
    about = _about(bytes(sealed[:HEAD_BYTES]), name, object_bytes)
    try:
        _cipher(key, head.cipher, head.random).decrypt_into(head.random[12:], sealed[HEAD_BYTES:], about, out)
    except InvalidTag:
        raise ValueRefused("forged", "it is not what was sealed under this name") from None


def best_cipher(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The cipher that this processor has instructions for: AES-NI with PCLMULQDQ, or ARMv8's AES with PMULL."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return "chacha20-poly1305"
    flags = {flag for line in text.splitlines() if line.startswith(("flags", "Features")) for flag in line.split()}
    return "aes-256-gcm" if "aes" in flags and flags & {"pclmulqdq", "pmull"} else "chacha20-poly1305"


def _cipher(key: DataKey, cipher: int, random: bytes) -> AESGCM | ChaCha20Poly1305:
    return _MAKERS[cipher](_expand(key.secret, b"kvf value 1\0" + bytes([cipher]) + random[:12]))


def _about(head: bytes, name: ValueName, object_bytes: int) -> bytes:
    return b"".join((head, name.key, name.layout, object_bytes.to_bytes(8, "little"), name.tenant.encode()))


def _expand(secret: bytes, info: bytes) -> bytes:
    return bytes(HKDFExpand(hashes.SHA256(), SECRET_BYTES, info).derive(secret))
