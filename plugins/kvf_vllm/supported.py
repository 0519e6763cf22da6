"""The releases of vLLM that the connector supports. Pure."""

from __future__ import annotations

import re

from kvframework.errors import VersionMismatch

FIRST = (0, 30)
BEYOND = (0, 33)


def check_version(version: str) -> None:
    """Raises `VersionMismatch` for a release outside the supported range, or one whose number cannot be read."""
    number = _number(version)
    if number is None or not FIRST <= number < BEYOND:
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
