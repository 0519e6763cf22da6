"""What becomes of a valid message in bad hands. Every choice is made by the `Random` that is given, so that hypothesis
can steer it, and a flood over sockets can repeat itself by its seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

Tree = Any
Path = tuple[Any, ...]

# Lengths that are declared and never come: arrays, maps, texts, bytes and extensions.
HUGE = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xde\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
]
DEEP = [b"\x91" * 5000 + b"\x00", b"\x81\xa1a" * 5000 + b"\x00", b"\x91" * 100 + b"\x90"]
ODD = [
    b"\xc1",  # the one byte that msgpack never uses
    b"\xa3\xed\xa0\x80",  # a surrogate
    b"\xa2\xff\xfe",  # no UTF-8
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xc7\x0c\xff\xff\xff\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00",  # one with impossible nanoseconds
    b"\xd4\x05\x00",  # an extension
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
]
VALUES = [None, True, False, -1, 0, 1, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), math.nan, math.inf, -0.0, 1e308]
TEXTS = ["", "\0", "x" * 70_000, "\x1b[2J", "../../etc/passwd", "ü\u202e", "NaN"]
BLOBS = [b"", b"\0", bytes(15), bytes(16), bytes(31), bytes(32), bytes(33), b"\xff" * 4096]


def as_tree(message: msgspec.Struct) -> Tree:
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def mutated(rng: Random, message: msgspec.Struct) -> bytes:
    """Its payload after one to three changes of what it says, then perhaps one of its bytes."""
    tree = as_tree(message)
    for _ in range(rng.randint(0, 3)):
        tree = _changed(rng, tree)
    packed = msgspec.msgpack.encode(tree)
    return mutated_bytes(rng, packed) if rng.random() < 0.4 else packed


def mutated_bytes(rng: Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    match rng.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data + rng.randbytes(rng.randint(1, 20))
        case 2 if data:
            at = min(at, len(data) - 1)
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 3:
            return data[:at] + rng.choice(HUGE + ODD) + data[at:]
        case 4:
            return data[:at] + data + data[at:]
        case _:
            return rng.randbytes(rng.randint(0, 40))


def mutated_frames(rng: Random, frames: list[bytes]) -> list[bytes]:
    """A message with a wrong number, order or size of frames."""
    frames = list(frames)
    at = rng.randrange(len(frames))
    match rng.randrange(6):
        case 0:
            del frames[at]
        case 1:
            frames.insert(at, rng.randbytes(rng.choice([0, 1, 8, 70])))
        case 2:
            rng.shuffle(frames)
        case 3:
            frames += [b""] * rng.choice([1, 2, 3, 5, 5000])
        case 4:
            frames[at] = mutated_bytes(rng, frames[at])
        case _:
            frames = frames[: at + 1]
    return frames


def array_of(element: bytes, count: int) -> msgspec.Raw:
    """`count` times the same element, without an object for each."""
    return msgspec.Raw(b"\xdd" + count.to_bytes(4, "big") + element * count)


def _odd(rng: Random) -> Tree:
    match rng.randrange(7):
        case 0:
            return msgspec.Raw(rng.choice(HUGE))
        case 1:
            return msgspec.Raw(rng.choice(DEEP))
        case 2:
            return msgspec.Raw(rng.choice(ODD))
        case 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice(BLOBS)
        case 5:
            return [rng.choice(VALUES) for _ in range(rng.choice([0, 1, 3, 300]))]
        case _:
            return rng.choice(VALUES)


def _changed(rng: Random, tree: Tree) -> Tree:
    places = list(_places(tree))
    if not places or rng.random() < 0.05:
        return _odd(rng)
    path = rng.choice(places)
    parent = _at(tree, path[:-1])
    kind = rng.randrange(5)
    if isinstance(parent, dict) and kind == 0:
        del parent[path[-1]]
    elif isinstance(parent, dict) and kind == 1:
        parent[rng.choice(["unknown", "", "x" * 300, path[-1] + "2"])] = _odd(rng)
    elif isinstance(parent, dict) and kind == 2 and len(path) == 1:
        return _with_duplicates(rng, parent)
    elif isinstance(parent, list) and kind <= 2:
        parent[:] = parent * rng.choice([0, 2, 100 if len(parent) < 10 else 1])
    else:
        parent[path[-1]] = _odd(rng)
    return tree


def _with_duplicates(rng: Random, tree: dict[str, Tree]) -> msgspec.Raw:
    pairs = [*tree.items(), *((name, rng.choice([_odd(rng), tree[name]])) for name in rng.choices(list(tree), k=3))]
    rng.shuffle(pairs)
    encode = msgspec.msgpack.encode
    return msgspec.Raw(b"\xde" + len(pairs).to_bytes(2, "big") + b"".join(encode(k) + encode(v) for k, v in pairs))


def _places(tree: Tree, path: Path = ()) -> Iterator[Path]:
    if isinstance(tree, dict):
        for name, each in tree.items():
            yield (*path, name)
            yield from _places(each, (*path, name))
    elif isinstance(tree, list):
        for index, each in enumerate(tree[:50]):
            yield (*path, index)
            yield from _places(each, (*path, index))


def _at(tree: Tree, path: Path) -> Tree:
    for key in path:
        tree = tree[key]
    return tree
