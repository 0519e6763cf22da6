"""The checks of `kvframework doctor` for the folder. Only reads: it creates, locks and writes nothing, since a server
may be using the folder."""

from __future__ import annotations

import os
import stat

from kvf_filesystem.options import FilesystemOptions
from kvf_filesystem.root import MARKER
from kvframework.api.findings import Finding
from kvframework.api.options import ByteSize

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
    status = os.stat(base)
    if not stat.S_ISDIR(status.st_mode):
        return Finding("filesystem.folder", "fail", f"{base} is no folder", "name a folder in path")
    if not os.access(base, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        fact = f"{base} is not writable for uid {os.geteuid()}: {stat.filemode(status.st_mode)}, of uid {status.st_uid}"
        return Finding("filesystem.folder", "fail", fact, "check owner and mode, or name another folder in path")
    if base != path:
        return Finding("filesystem.folder", "ok", f"{path} is not there yet; it will be made in {base}")
    if status.st_mode & stat.S_IWOTH:
        fact = f"any user may write to {path}: {stat.filemode(status.st_mode)}"
        return Finding("filesystem.folder", "fail", fact, "name a folder in it, or take the right away: chmod o-w")
    return Finding("filesystem.folder", "ok", f"{path} is writable")


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
