"""The checks of `kvframework doctor` for the folder. Only reads: it creates, locks and writes nothing, since a server
may be using the folder."""

from __future__ import annotations

import os

from kvf_filesystem.options import FilesystemOptions
from kvf_filesystem.root import MARKER
from kvframework.api.options import ByteSize
from kvframework.api.plugin import Finding

_LEAST_FREE = 0.05


def diagnose(options: FilesystemOptions) -> list[Finding]:
    """Checks the folder by a few calls of the file system, which block as long as that does."""
    path = os.path.abspath(os.path.expanduser(options.path))
    there = os.path.exists(path)
    base = path
    while not os.path.exists(base):
        base = os.path.dirname(base)
    return [_folder(path, base), _space(base, options, stored=there and os.path.exists(os.path.join(path, MARKER)))]


def _folder(path: str, base: str) -> Finding:
    """The finding for a usable folder; `check_root` refuses any other."""
    made = "is writable" if base == path else f"is not there yet; it will be made in {base}"
    return Finding("filesystem.folder", "ok", f"{path} {made}")


def _space(base: str, options: FilesystemOptions, *, stored: bool) -> Finding:
    """Checks the free space. In a folder with values part of the capacity is taken already, so only the free space
    counts."""
    system = os.statvfs(base)
    free, size = ByteSize(system.f_bavail * system.f_frsize), ByteSize(system.f_blocks * system.f_frsize)
    fact = f"{free} free of {size}, for a capacity of {options.capacity}"
    advice = "lower capacity, or name a folder on a larger disk: a full disk fails every write"
    if size < options.capacity:
        return Finding("filesystem.space", "fail", fact, advice)
    if free < (_LEAST_FREE * options.capacity if stored else options.capacity):
        return Finding("filesystem.space", "warn", fact, advice)
    return Finding("filesystem.space", "ok", fact)
