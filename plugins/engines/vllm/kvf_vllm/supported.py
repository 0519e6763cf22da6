"""The releases of vLLM that the connector supports, and later ones that it tries. Reads vLLM's source of a release that
is not supported."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvf_vllm.interface import installed_fingerprint
from kvframework.errors import VersionMismatch

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
