"""Why the first missing chunk of a lookup missed. Pure: the facts are gathered elsewhere, and decided upon here.

A later event explains more than an earlier one, and what the server knows of an object more than what it knows of
others: so a tier that failed during the lookup comes first, then what became of the object, then where else its chunk
is readable, then the server's start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvframework.api.keys import NAMESPACE_BYTES, SALT_BYTES
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.storage.l1.departures import CAUSES, EVICTIONS, Ghost
from kvframework.storage.namespaces import NamespaceRecord

# Content of an earlier server is missed for this long after a start; later most prompts are new.
START_EXPLAINS_S = 3600.0
_EVICTIONS = frozenset(CAUSES[cause] for cause in EVICTIONS)
_PLAIN_SALT = bytes(SALT_BYTES)
_SALT = slice(NAMESPACE_BYTES, NAMESPACE_BYTES + SALT_BYTES)
_RANK = slice(_SALT.stop, _SALT.stop + 4)


class Why(NamedTuple):
    """A reason, one of `REASONS` of `wire.messages`, and what else is known, in words. Of what has a time: `at`, of the
    clock of the storage; of an eviction: after how many seconds without a use, and by which model's objects."""

    reason: str
    detail: str = ""
    at: float | None = None
    idle_s: float = 0.0
    by: str = ""


class Facts(NamedTuple):
    """What is known of a missing object when the lookup ends.

    `unanswered`: the load had not ended when its client gave up. `priced`: the prices that cut the hit before it, ""
    if none did. `down`: the tier that failed since the lookup's begin,
    "" for none. `refused`: no load began, although there is a tier. `tiers_cleared_at`: when the tiers were last
    cleared of such objects. `elsewhere`: why the same chunk is readable under another name. `named`: whether the
    namespace is known. `from_before`: the client used an earlier server, whose content this one
    began without; `up_s`: seconds since its start.
    """

    unanswered: bool = False
    priced: str = ""
    down: str = ""
    refused: bool = False
    ghost: Ghost | None = None
    tiers_cleared_at: float | None = None
    elsewhere: Why | None = None
    named: bool = True
    from_before: bool = False
    up_s: float = 0.0


def decide(facts: Facts) -> Why:
    """Return the one reason that explains a miss."""
    ghost = facts.ghost
    if facts.unanswered:
        return Why("timed_out", "its client did not wait for the end of the load")
    if facts.priced:
        return Why("priced", facts.priced)
    if facts.down:
        return Why("tier_down", facts.down)
    if facts.refused:
        return Why("timed_out", "the load did not begin, as too many were under way")
    if ghost is not None:
        cleared = facts.tiers_cleared_at
        if cleared is not None and cleared >= ghost.at:
            return Why("cleared", "from L2, too", cleared)
        if ghost.cause in _EVICTIONS:
            return Why("evicted", _EVICTED.get(ghost.cause, ""), ghost.at, ghost.idle_s, ghost.by)
        return Why(ghost.cause, "", ghost.at)
    if facts.elsewhere is not None:
        return facts.elsewhere
    if facts.from_before and facts.up_s < START_EXPLAINS_S:
        return Why("server_started", "its client has used an earlier server")
    if not facts.named:
        return Why("unknown_namespace", "no instance has registered it here, and no tier knows it")
    return _NEVER_STORED


_NEVER_STORED = Why("never_stored")
# Of a load that found all its objects.
LOAD_REFUSED = Why("dropped_share", "its load was refused, as its client keeps its share of L1 from eviction")
_EVICTED = {
    "watermark": "to stay below the high watermark",
    "tenant": "by the share of its tenant",
    "hinted": "as a request had said that no one asks for it again",
}


class Row(NamedTuple):
    """A row of L1 that has the missing chunk: its key prefix, and what is known of its namespace."""

    prefix: bytes
    record: NamespaceRecord | None


def elsewhere(key: bytes, mine: NamespaceRecord | None, model: str, rows: Iterable[Row]) -> Why | None:
    """Return why a chunk that is readable under the prefixes of `rows` is not readable under `key`; None if none of
    them says so. `mine` is the record of the key's namespace, `model` the name that its client gives."""
    best: Why | None = None
    for row in rows:
        if row.prefix[:NAMESPACE_BYTES] == key[:NAMESPACE_BYTES]:
            if row.prefix[_SALT] == key[_SALT]:
                rank = int.from_bytes(key[_RANK], "little")
                return Why("never_stored", f"by rank {rank}, while another rank or layer group has it")
            return Why("other_salt", _salts(key[_SALT], row.prefix[_SALT]))
        theirs = row.record
        if theirs is None:
            continue
        if theirs.model_name == model:
            best = Why("other_namespace", _difference(mine, theirs))
        elif best is None and mine is not None and mine.desc == theirs.desc:
            best = Why("other_namespace", f"stored under the model name {theirs.model_name!r}")
    return best


def _salts(mine: bytes, theirs: bytes) -> str:
    if mine == _PLAIN_SALT:
        return "stored with a salt, asked without one"
    if theirs == _PLAIN_SALT:
        return "stored without a salt, asked with one"
    return "stored with another salt, or another order of layers"


def _difference(mine: NamespaceRecord | None, theirs: NamespaceRecord) -> str:
    """Say in what two namespaces of one model differ, theirs first."""
    if mine is None:
        return "stored under a namespace that is known here, asked under one that is not"
    if theirs.world_size != mine.world_size:
        return f"world size {theirs.world_size}, not {mine.world_size}"
    found = _layout_difference(mine.desc, theirs.desc)
    return found or "other weights, revision, quantisation or packing"


def _layout_difference(mine: MemoryLayoutDesc, theirs: MemoryLayoutDesc) -> str:
    if len(theirs.groups) != len(mine.groups):
        return f"{len(theirs.groups)} layer groups, not {len(mine.groups)}"
    for number, (here, there) in enumerate(zip(mine.groups, theirs.groups, strict=True)):
        for name in GroupDesc.__struct_fields__:
            if getattr(there, name) != getattr(here, name):
                of = f" in layer group {number}" if len(mine.groups) > 1 else ""
                return f"{name} {_shown(getattr(there, name))}, not {_shown(getattr(here, name))}{of}"
    return ""


def _shown(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)[:80]
