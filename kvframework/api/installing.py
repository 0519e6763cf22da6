"""The requirement of pip that installs kvframework: the one place from which errors, templates and docs take it. And
whether the compiled kernels of this installation are there: without them all works, and is slower.

kvframework is on no package index yet, so it is installed from the folder of a clone. On the day of its release the
values of `SOURCES` become the names, and `python -m tests.docs.generate` brings the pages into step.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger(__name__)

__all__ = ["install_command", "load_library", "requirement"]

_PACKAGES = {
    "codecs": ("crypto",),
    "devices": ("cuda",),
    "engines": ("blend", "sglang", "transformers", "vllm"),
    "tiers": ("filesystem", "mooncake", "peers", "quota", "redis", "s3"),
    "tools": ("control", "demo", "dev", "observe", "plan", "route", "run"),
}
SOURCES = {
    "kvframework": "DIR-OF-CLONE",
    "kvframework-bench": "DIR-OF-CLONE/benchmarks",
    "kvframework-devices": "DIR-OF-CLONE/plugins/devices/driver",
    "kvframework-events": "DIR-OF-CLONE/plugins/events",
    **{
        f"kvframework-{name}": f"DIR-OF-CLONE/plugins/{folder}/{name}"
        for folder, names in _PACKAGES.items()
        for name in names
    },
}

# Those that require others of this project: a file of requirements/ has them all, by paths from the clone's root.
_TOGETHER = {f"kvframework-{name}": name for name in ("bench", "control", "demo", "route")}
# What one requires beside the core, where its extras are a choice that no such file makes.
_REQUIRED = {"kvframework-cuda": "kvframework-devices"}


def requirement(*extras: str, distribution: str = "kvframework") -> str:
    """Return what pip is given for a distribution of this project with extras, quoted for a shell where it must be."""
    source = SOURCES[distribution]
    return f'"{source}[{",".join(extras)}]"' if extras else source


def install_command(*extras: str, distribution: str = "kvframework") -> str:
    """Return the command that installs a distribution of this project with extras, for errors and probes."""
    if distribution in _TOGETHER and not extras and SOURCES[distribution] != distribution:
        return f"cd {SOURCES['kvframework']} && pip install -r requirements/{_TOGETHER[distribution]}.txt"
    wanted = requirement(*extras, distribution=distribution)
    if distribution in _REQUIRED and SOURCES[distribution] != distribution:
        wanted = f"{requirement(distribution=_REQUIRED[distribution])} {wanted}"
    return f"pip install {wanted}"


def load_library(
    file: Path, prefix: str, version: int, *, instead: str, load: type[ctypes.CDLL] = ctypes.CDLL
) -> ctypes.CDLL | None:
    """Return a compiled library of this build, None if it was not built. If the library's function `PREFIX_abi`
    returns another version, log that with the text `instead`, and return None. Blocks while it reads the file."""
    try:
        library = load(str(file))
    except OSError as error:
        log.debug("no kernel: %s", error)
        return None
    found = int(getattr(library, f"{prefix}_abi")())
    if found != version:
        log.warning("kernel %s has version %d, expected %d; until it is rebuilt: %s", file, found, version, instead)
        return None
    return library


# The use of each compiled library, by package and path.
_LIBRARIES = {
    ("kvf_cpu_gather", "native/libkvf_copy.so"): "copies of cpu_gather",
    ("kvf_hashers", "native/libkvf_sha256.so"): "hashes",
    ("kvf_codecs", "native/libkvf_planes.so"): "planes of codecs",
    ("kvframework", "api/native/libkvf_streaming.so"): "copies that bypass caches",
    ("kvframework", "client/native/libkvf_token_ids.so"): "packing of token ids",
}


@functools.cache
def missing_kernels() -> tuple[str, ...]:
    """Return the purposes of compiled kernels that cannot be loaded. The first call blocks: it loads kernels."""
    return tuple(what for (package, library), what in _LIBRARIES.items() if not _loads(package, library))


def kernels_hint() -> str:
    """Return the command that installs the compiled kernels."""
    return f"put a C compiler into PATH and run: {install_command()} --force-reinstall --no-deps"


@functools.cache
def warn_of_missing_kernels() -> None:
    """Log which compiled kernels are missing, once per process. Blocks as `missing_kernels`."""
    if missing := missing_kernels():
        log.warning("compiled kernels are missing, so these are slower: %s; %s", ", ".join(missing), kernels_hint())


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
