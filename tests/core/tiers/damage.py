"""What goes wrong with a stored value from outside: in Redis, and in a folder."""

from __future__ import annotations

import random
from pathlib import Path

import redis
from kvf_filesystem.form import path_of

KINDS = ("garbage", "empty", "wrong type", "truncated", "too long", "flipped bit", "swapped")


def damaged(value: bytes, kind: str, chance: random.Random) -> bytes:
    """What stands in place of `value`; for the kinds that concern the bytes of one value."""
    if kind == "garbage":
        return chance.randbytes(len(value))
    if kind == "empty":
        return b""
    if kind == "truncated":
        return value[: chance.randrange(1, len(value))]
    if kind == "too long":
        return value + chance.randbytes(chance.randrange(1, 1000))
    assert kind == "flipped bit"
    bit = chance.randrange(8 * len(value))
    return value[: bit // 8] + bytes([value[bit // 8] ^ 1 << bit % 8]) + value[bit // 8 + 1 :]


def damage_in_redis(client: redis.Redis, kind: str, key: bytes, other: bytes, chance: random.Random) -> bool:
    """`other` is whose value changes places with `key`'s. False if there is no such value to damage."""
    value = _get(client, key)
    if not value:
        return False
    if kind == "wrong type":
        # In one step: a server may write the key again at any time.
        client.pipeline(transaction=True).delete(key).rpush(key, b"a list").execute()
    elif kind == "swapped":
        others = _get(client, other)
        if not others or other == key:
            return False
        client.mset({key: others, other: value})
    else:
        client.set(key, damaged(value, kind, chance))
    return True


def damage_in_folder(folder: Path, kind: str, key: bytes, other: bytes, chance: random.Random) -> None:
    """Keeps what the file's head says of it, if possible, so that only what is behind can tell."""
    path = folder / path_of(key)
    if kind == "wrong type":
        path.unlink()
        path.symlink_to("/dev/zero")
    elif kind == "swapped":
        values = path.read_bytes(), (folder / path_of(other)).read_bytes()
        (folder / path_of(other)).write_bytes(values[0])
        path.write_bytes(values[1])
    else:
        path.write_bytes(damaged(path.read_bytes(), kind, chance))


def _get(client: redis.Redis, key: bytes) -> bytes:
    try:
        value = client.get(key)
    except redis.ResponseError:  # of another type already
        return b""
    return value if isinstance(value, bytes) else b""
