"""The address of one server, and its text form. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_WRITTEN = re.compile(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\[\]:@/\s]+)):(\d{1,5})")


class Place(NamedTuple):
    """Host and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """ "host:port" or "[IPv6]:port"; None for anything else."""
        match = _WRITTEN.fullmatch(text)
        if match is None or not 0 < int(match[3]) < 1 << 16:
            return None
        return cls(match[1] or match[2], int(match[3]))
