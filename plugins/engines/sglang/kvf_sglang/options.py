"""The options of backend and linker: the `kvframework.*` keys of SGLang's extra configuration; and the
releases of SGLang whose interfaces are known. Pure."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvframework.client import EngineOptions, Seconds, engine_options
from kvframework.errors import VersionMismatch

log = logging.getLogger(__name__)

BACKEND = "--hicache-storage-backend-extra-config"
LINKER = "linker_extra_config of --unified-cache-external-linker-config"

KNOWN = ("0.5.23",)
# Of the interface in the known releases, see `interface_of`.
FINGERPRINT = "5b5de94d3c9e528c"
METHODS = (
    "register_mem_pool_host",
    "register_mem_host_pool_v2",
    "on_host_pools_registered",
    "batch_exists_v2",
    "batch_get_v2",
    "batch_set_v2",
    "batch_get_v1",
    "batch_set_v1",
    "get",
    "batch_get",
    "set",
    "batch_set",
    "exists",
    "batch_exists",
    "clear",
    "get_stats",
)


class SglangOptions(EngineOptions, frozen=True):
    """Each field is the key `kvframework.<field>`."""

    lookup_deadline_s: Annotated[
        Seconds, msgspec.Meta(description="longest wait for a lookup of pages and their load from L2")
    ] = 1.0
    load_deadline_s: Annotated[Seconds, msgspec.Meta(description="longest wait for a load of up to 128 pages")] = 2.0
    store_deadline_s: Annotated[Seconds, msgspec.Meta(description="longest wait for a store of up to 128 pages")] = 5.0


def parse_options(extra: Mapping[str, object], where: str = BACKEND) -> SglangOptions:
    """The options among SGLang's extra configuration, which the user knows as `where`. Raises as `engine_options`
    does."""
    return engine_options(
        extra,
        SglangOptions,
        where=where,
        page="https://github.com/kvframework/kvframework/tree/main/docs/engines/sglang.md",
    )


def interface_of(storage: type) -> str:
    """16 hex digits over the abstract and public methods of SGLang's storage class, with their parameters' names."""
    found = [
        f"{name}({', '.join(inspect.signature(getattr(storage, name)).parameters)})"
        for name in METHODS
        if hasattr(storage, name)
    ]
    more = sorted(set(getattr(storage, "__abstractmethods__", ())) - set(METHODS))
    return hashlib.blake2b("\n".join([*found, *more]).encode(), digest_size=8).hexdigest()


def check_linker_version(version: str) -> None:
    """Raise `VersionMismatch` for another release: the linker's interface has changed with each."""
    if version not in KNOWN:
        raise VersionMismatch(
            f"SGLang {version} is not supported: its linker interface changes with each release",
            where="kvf_sglang",
            available=f"SGLang {', '.join(KNOWN)}",
            hint="use the storage backend of the hierarchical cache, or install a supported SGLang",
        )


def check_version(version: str, interface: str) -> str:
    """Return "" for a known release. Another one with the same interface is tried: logs a warning, and returns the
    release, since its pools may mean something else by the same names. Raises `VersionMismatch` for one with another
    interface."""
    if version in KNOWN:
        return ""
    if interface != FINGERPRINT:
        raise VersionMismatch(
            f"SGLang {version} has a storage interface that this backend does not support",
            where="kvf_sglang",
            available=f"SGLang {', '.join(KNOWN)}, and releases with the same interface",
            hint="install a supported SGLang, or a later kvframework",
        )
    log.warning(
        "SGLang %s is untested with this release, but its storage interface equals that of %s", version, KNOWN[-1]
    )
    return version
