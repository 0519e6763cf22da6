"""Whether the compiled kernels of this installation are there: without them all works, and is slower."""

from __future__ import annotations

import ctypes
import functools
import logging
from importlib.util import find_spec
from pathlib import Path

from kvframework.api.installing import install_command

log = logging.getLogger(__name__)

# What each is for, by its package and its library there.
_LIBRARIES = {
    ("kvf_cpu_gather", "native/libkvf_copy.so"): "copies of cpu_gather",
    ("kvf_hashers", "native/libkvf_sha256.so"): "hashes",
    ("kvf_codecs", "native/libkvf_planes.so"): "planes of codecs",
    ("kvframework", "api/native/libkvf_streaming.so"): "copies past the caches",
    ("kvframework", "client/native/libkvf_token_ids.so"): "packing of token ids",
}


@functools.cache
def missing_kernels() -> tuple[str, ...]:
    """Return what the kernels are for that cannot be loaded. Blocking: the first call loads the others."""
    return tuple(what for (package, library), what in _LIBRARIES.items() if not _loads(package, library))


def kernels_hint() -> str:
    return f"with a C compiler in PATH run: {install_command()} --force-reinstall --no-deps"


@functools.cache
def warn_of_missing_kernels() -> None:
    """Log what is missing, once a process."""
    if missing := missing_kernels():
        log.warning("no compiled kernels for %s, which is slower; %s", ", ".join(missing), kernels_hint())


def _loads(package: str, library: str) -> bool:
    found = find_spec(package)
    if found is None or found.origin is None:
        return True  # nothing here uses it
    try:
        ctypes.CDLL(str(Path(found.origin).parent / library))
    except OSError as error:
        log.debug("no kernel: %s", error)
        return False
    return True
