"""Keys out of the bytes that a terminal sends. Pure."""

from __future__ import annotations

import re

_ESCAPE = 0x1B
# What a terminal sends for a key without a letter: CSI or SS3, numbers, and a last byte.
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*([@-~])|O([@-~]))")
_OPEN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?")
_NAMES = {b"A": "up", b"B": "down", b"C": "right", b"D": "left", b"Z": "backtab"}
_NUMBERED = {b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown"}
_LONGEST = 32


class Keys:
    """A decoder. A sequence may come in pieces; one that means nothing here is no key."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, received: bytes) -> list[str]:
        """The keys that are complete: letters as they are, others by name."""
        data, self._left = self._left + received, b""
        keys = []
        at = 0
        while at < len(data):
            if data[at] != _ESCAPE:
                keys += _letter(data[at])
                at += 1
            elif found := _SEQUENCE.match(data, at):
                keys += _sequence(found)
                at = found.end()
            elif _OPEN.fullmatch(data, at) and len(data) - at < _LONGEST:
                self._left = data[at:]
                return keys
            else:
                at += 1  # an Esc alone
        return keys


def _letter(code: int) -> list[str]:
    if code == 0x09:
        return ["tab"]
    return [chr(code)] if 0x20 <= code < 0x7F else []


def _sequence(found: re.Match[bytes]) -> list[str]:
    name = _NUMBERED.get(found[0]) or _NAMES.get(found[1] or found[2])
    return [name] if name else []
