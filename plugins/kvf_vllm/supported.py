"""The releases of vLLM that the connector supports. Pure."""

from __future__ import annotations

import re

from kvframework.errors import VersionMismatch

FIRST = (0, 30)
BEYOND = (0, 33)


def check_version(version: str) -> None:
    """Raises `VersionMismatch` for a release outside the supported range, or one whose number cannot be read."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not FIRST <= (int(match[1]), int(match[2])) < BEYOND:
        raise VersionMismatch(
            f"this is vLLM {version}, whose connector interface is not the one that this connector follows",
            where="kvf_vllm",
            available=f"vLLM from {_text(FIRST)} up to, but not including, {_text(BEYOND)}",
            hint="install such a vLLM, or the kvframework release that follows this one",
        )


def _text(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)
