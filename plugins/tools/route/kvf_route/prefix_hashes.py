"""The router's own names of blocks: hashes of all tokens up to a block's end, and of what else makes its KV. Pure.

Publishers choose their hashes as they like, so requests could not ask by them. These are the same for all publishers
and for requests; they hold for one process, with a seed that it alone has.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from kvf_route.index import Keys

_SEED = secrets.randbits(64)
_SALT = b"salt\0"


def root(adapter: str = "") -> bytes:
    """The parent of a first block; `adapter` is the name of the request's LoRA adapter."""
    return xxhash.xxh3_64_digest(adapter.encode("utf-8", "surrogatepass"), _SEED)


def salted(salt: str) -> bytes:
    """What a first block gets folded in for a request's salt; nothing for none."""
    return _SALT + salt.encode("utf-8", "surrogatepass") if salt else b""


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids, 4 bytes each. Raises `OverflowError` for one that is no u32, `TypeError` for no integer."""
    return array("I", tokens).tobytes()


def chained(parent: bytes, tokens: bytes, block_tokens: int, extras: Mapping[int, bytes] | None = None) -> list[bytes]:
    """The name of each whole block after `parent`, 8 bytes. `extras` are folded in, by the block's number."""
    step, digest, names = block_tokens * 4, xxhash.xxh3_64_digest, []
    name, extras = parent, extras or {}
    for number, begin in enumerate(range(0, len(tokens) - step + 1, step)):
        if extras.get(number):
            name = digest(name + extras[number], _SEED)
        name = digest(name + tokens[begin : begin + step], _SEED)
        names.append(name)
    return names


def as_keys(names: Sequence[bytes]) -> Keys:
    """Names as numbers for an `Index`."""
    return np.frombuffer(b"".join(names), ">u8").astype(np.uint64)


def short(name: bytes) -> int:
    """A publisher's hash of any length as a number for an `Index`."""
    return xxhash.xxh3_64_intdigest(name, _SEED)
