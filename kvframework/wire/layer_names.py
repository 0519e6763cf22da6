"""The natural order of the names of layers, in which numbers in a text compare as numbers. Pure."""

from __future__ import annotations

import re


def natural(name: str) -> tuple[list[tuple[str, int, str]], str]:
    """Alternate texts and numbers, numbers without leading zeros; then the name itself, since "1" and "01" differ."""
    parts = re.split(r"([0-9]+)", name)
    numbers = [number.lstrip("0") for number in (*parts[1::2], "")]
    return [(text, len(number), number) for text, number in zip(parts[::2], numbers, strict=True)], name
