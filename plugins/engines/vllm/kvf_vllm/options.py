"""The connector's options, the `kvframework.*` keys of vLLM's `kv_connector_extra_config`; and the releases of vLLM
that it supports, or tries after a look into their source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import msgspec

from kvf_vllm.interface import installed_fingerprint
from kvframework.client import EngineOptions, Seconds, engine_options
from kvframework.errors import VersionMismatch

WHERE = "kv_transfer_config.kv_connector_extra_config"

FIRST = (0, 30)
BEYOND = (0, 33)
# Fingerprints of interfaces, see `interface`, that are equal in all that the connector does: that of the last supported
# release, and those of later ones whose differences were read, but which could not be run.
EQUAL = frozenset(
    {
        "82d27dcfbc132840c734228e2215c1ae",  # 0.32.0
        "bd1898e740cc26e89deb7274c41a099c",  # 0.33.0: new optional fields of BlockStored and MLAAttentionSpec
    }
)


class VllmOptions(EngineOptions, frozen=True):
    """Each field is the key `kvframework.<field>`."""

    load: Annotated[
        Literal["async", "sync"],
        msgspec.Meta(
            description='"async": requests wait for their load while others run, and a whole prompt may be loaded; '
            '"sync": loads happen within the step that uses them, only for models with one KV group of full attention'
        ),
    ] = "async"
    layout: Annotated[
        Literal["opaque", "canonical"],
        msgspec.Meta(
            description='"opaque": blocks are stored as they lie, for engines that lay them out alike; "canonical": '
            "element by element, also for engines that lay them out otherwise, where that is exact"
        ),
    ] = "opaque"
    lookup_deadline_s: Annotated[
        Seconds, msgspec.Meta(description="how long a request may wait for its load from L2")
    ] = 2.0
    connect_timeout_s: Annotated[
        Seconds, msgspec.Meta(description="how long the engine's start waits for a server; later it is found by itself")
    ] = 5.0
    announce_salts: Annotated[
        bool,
        msgspec.Meta(
            description="true: events for routers name salted blocks with their salt, which every subscriber learns; "
            "false: salted blocks are not announced"
        ),
    ] = False
    min_hit_tokens: Annotated[
        int, msgspec.Meta(ge=0, le=1 << 24, description="external hits of fewer tokens are computed instead")
    ] = 0


def parse_options(extra: Mapping[str, object]) -> VllmOptions:
    """The options among vLLM's extra configuration. Raises as `engine_options` does."""
    return engine_options(extra, VllmOptions, where=WHERE, page="docs/engines/vllm.md")


def check_version(version: str, fingerprint: Callable[[], str] = installed_fingerprint) -> str:
    """Returns "" for a supported release, and for a later one whose interface is known to be equal its number, as
    "0.33": it is tried, with a warning. Raises `VersionMismatch` for any other, or one whose number cannot be read."""
    number = _number(version)
    if number is not None and FIRST <= number < BEYOND:
        return ""
    if number is not None and number >= BEYOND and fingerprint() in EQUAL:
        return _text(number)
    raise VersionMismatch(
        f"this is vLLM {version}, whose connector interface is not the one that this connector follows",
        where="kvf_vllm",
        available=f"vLLM from {_text(FIRST)} up to, but not including, {_text(BEYOND)}",
        hint="install such a vLLM, or the kvframework release that follows this one",
    )


def caches_adapters_by_path(version: str) -> bool:
    """True if vLLM's own prefix cache tells adapters apart by their path too, not only by their name."""
    return (_number(version) or FIRST) >= (0, 32)


def _number(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match is not None else None


def _text(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)
