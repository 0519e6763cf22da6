"""A filesystem tier on a folder, for its tests: how to make one, use it, and look at what lies on the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from kvf_filesystem import FilesystemOptions, kvf_tiers
from kvf_filesystem.form import path_of
from kvf_filesystem.root import MARKER
from kvf_filesystem.tier import FilesystemTier
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Outcome, TableContext, Tier
from tests.support.received import outcomes_of

# By this process, and not closed yet by `conftest.py`.
opened: list[FilesystemTier] = []


def options(path: Path | str, **table: object) -> FilesystemOptions:
    found = {"path": str(path), **table}
    return msgspec.convert(found, FilesystemOptions, dec_hook=lambda _, value: ByteSize.parse(value))


def open_tier(path: Path | str, **table: object) -> FilesystemTier:
    (provider,) = kvf_tiers()
    assert provider.probe() is None
    tier = provider.create(options(path, **table), TableContext(where="[[l2]] #1"))
    assert isinstance(tier, FilesystemTier)
    opened.append(tier)
    return tier


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def fresh_key() -> bytes:
    return os.urandom(PACKED_KEY_BYTES)


def put(tier: Tier, key: bytes, value: bytes | bytearray, deadline: float | None = None) -> Outcome:
    return tier.put([key], [[memoryview(value)]], deadline=deadline or soon())[0]


def get(tier: Tier, key: bytes, nbytes: int) -> tuple[Outcome, bytes]:
    buffer = bytearray(nbytes)
    (outcome,) = outcomes_of(tier.get_into([key], [[memoryview(buffer)]], deadline=soon()))
    return outcome, bytes(buffer)


def contains(tier: Tier, key: bytes) -> Outcome:
    return tier.contains([key], deadline=soon())[0]


def delete(tier: Tier, key: bytes) -> Outcome:
    return tier.delete([key], deadline=soon())[0]


def used(tier: Tier) -> int:
    return tier.usage(deadline=soon()).used_bytes


def file_of(root: Path, key: bytes) -> Path:
    return root / path_of(key)


def files(root: Path) -> list[Path]:
    """All but the marker, temporary ones too."""
    return [path for path in root.rglob("*") if not path.is_dir() and path.name != MARKER]


def temporary_files(root: Path) -> list[Path]:
    return [path for path in files(root) if path.name.endswith(".tmp")]


def open_files(below: Path) -> list[str]:
    """What this process has open below a folder."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
        if target.startswith(str(below)):
            found.append(target)
    return found
