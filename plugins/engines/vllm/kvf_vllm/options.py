"""The connector's options, the `kvframework.*` keys of vLLM's `kv_connector_extra_config`; and the releases of vLLM
that it supports, or tries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from kvframework.client import EngineOptions, Seconds, engine_options
from kvframework.errors import VersionMismatch

WHERE = "kv_transfer_config.kv_connector_extra_config"

SUPPORTED = ("0.30", "0.31", "0.32")
# Its source was read, and it was not run.
TRIED = "0.33"


class VllmOptions(EngineOptions, frozen=True):
    """Each field is the key `kvframework.<field>`."""

    load: Annotated[
        Literal["auto", "async", "sync"],
        msgspec.Meta(
            description='"async": requests wait for their load while others run, and a whole prompt may be loaded; '
            '"sync": loads happen within the step that uses them, only for models with one KV group of full attention; '
            '"auto": a load happens within the step if it takes at most a quarter of the expected time of that step, '
            "or at most 50 ms while the engine is idle, else between steps"
        ),
    ] = "auto"
    layout: Annotated[
        Literal["opaque", "canonical"],
        msgspec.Meta(
            description='"opaque": whole blocks, for engines with equal block layouts; "canonical": '
            "element by element, also for engines with other block layouts, if the conversion is exact"
        ),
    ] = "opaque"
    lookup_deadline_s: Annotated[Seconds, msgspec.Meta(description="longest wait of a request for KV from L2")] = 2.0
    autostart: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^([0-9.]+ *[KMGTkmgt]?i?[Bb]?)?$",
            description="capacity of L1, such as 8GiB: if no server runs, the engine starts one with "
            "kvframework-run; empty: the engine starts no server",
        ),
    ] = ""
    connect_timeout_s: Annotated[
        Seconds,
        msgspec.Meta(description="longest wait for a server at the engine's start; a later server is found too"),
    ] = 5.0
    announce_salts: Annotated[
        bool,
        msgspec.Meta(
            description="true: events for routers name salted blocks with their salt, which every subscriber learns; "
            "false: salted blocks are not announced"
        ),
    ] = False
    weights_secret: Annotated[
        str,
        msgspec.Meta(
            description="file with a secret, equal on all replicas of one training run: replicas that announced the "
            "same weight_version share KV; empty: only weights from files are shared"
        ),
    ] = ""
    min_hit_tokens: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=1 << 24,
            description="fewest tokens of a hit that the engine loads; the engine computes shorter hits",
        ),
    ] = 0


def parse_options(extra: Mapping[str, object]) -> VllmOptions:
    """The options among vLLM's extra configuration. Raises as `engine_options` does."""
    return engine_options(
        extra,
        VllmOptions,
        where=WHERE,
        page="https://github.com/kvframework/kvframework/tree/main/docs/engines/vllm.md",
    )


def check_version(version: str) -> str:
    """Return "" for a supported release, and for `TRIED` its number: it is tried, with a warning. Raises
    `VersionMismatch` for any other."""
    release = _release(version)
    if release not in (*SUPPORTED, TRIED):
        raise VersionMismatch(
            f"this is vLLM {version}, whose connector interface this connector does not support",
            where="kvf_vllm",
            available=f"vLLM {', '.join(SUPPORTED)}; {TRIED} is tried",
            hint="install a supported vLLM, or a later kvframework",
        )
    return release if release == TRIED else ""


def check_offloading(version: str, *, on_cpu: bool) -> None:
    """Raise `VersionMismatch` for a release whose offloading `KvFrameworkOffloading` does not follow: before 0.32 vLLM
    registers no memory of others with a device."""
    known = [*(SUPPORTED if on_cpu else SUPPORTED[-1:]), TRIED]
    if _release(version) not in known:
        raise VersionMismatch(
            f"KvFrameworkOffloading does not support device offloading in vLLM {version}",
            where="kvf_vllm",
            available=f"vLLM {', '.join(known)}",
            hint='use "kv_connector": "KvFrameworkConnector"',
        )


def caches_adapters_by_path(version: str) -> bool:
    """True if vLLM's own prefix cache tells adapters apart by their path too, not only by their name."""
    return _release(version) not in ("0.30", "0.31")


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])
