"""The names that plugins may have, as `kvframework new` and `kvframework plugins check` judge them. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvframework.api.codec import MAX_CODEC_NAME

MAX_NAME = 32
_WORDS = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# The bounds of the kinds that have one of their own: each value in L2 carries the name of its codec.
_LONGEST = {"codec": MAX_CODEC_NAME}
# Words that mean something else wherever the name of such a plugin is written.
_RESERVED = {
    ("codec", "allow"): "`allow` is a key of [codecs], beside the tables [codecs.NAME]",
    ("transport", "auto"): "`auto` lets an engine choose among the server's transports",
}


class NameFault(NamedTuple):
    """Why a plugin cannot have a name, which names there may be, and the nearest of them, "" for none."""

    fact: str
    available: str
    nearest: str


def name_fault(kind: str, name: str) -> NameFault | None:
    """Return why a plugin of a kind cannot have a name, or None. `kind` need not exist."""
    longest = _LONGEST.get(kind, MAX_NAME)
    available = f"lower-case letters, digits and single underscores between them, at most {longest}"
    if reason := _RESERVED.get((kind, name)):
        return NameFault(f"{name!r} cannot be the name of a {kind}: {reason}", available, f"{name}_{kind}")
    if _WORDS.fullmatch(name) and len(name) <= longest:
        return None
    fact = f"{name!r} cannot be the name of a {kind}"
    if len(name) > longest:
        fact += f": it has {len(name)} characters"
    return NameFault(fact, available, _nearest(name, longest))


def _nearest(name: str, longest: int) -> str:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip()).lower().removeprefix("kvf-").removeprefix("kvf_")
    tried = re.sub(r"[^a-z0-9]+", "_", spaced).strip("_")[:longest].rstrip("_")
    return tried if _WORDS.fullmatch(tried) else ""
