"""What the numbers mean that Mooncake Store answers instead of raising. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvframework.api.tier import Outcome
from kvframework.errors import TierError

OK = 0
NO_OBJECT = -704
# The object is being written, or its writer has died.
NOT_READY = -703
INVALID = -600
# Of a write: another client has begun to write the object, or has deleted it, since this one began.
REPLACED_MEANWHILE = frozenset({-601, NO_OBJECT})

_WORDS = {
    -1: "the setup failed",
    -200: "the segments of all peers are full",
    INVALID: "refused as an invalid parameter",
    -601: "another client has replaced the object meanwhile",
    -700: "refused as an invalid write",
    -701: "refused as an invalid read",
    -702: "no such replica",
    NOT_READY: "the object is being written",
    NO_OBJECT: "no such object",
    -705: "the object is there already",
    -706: "the object has a lease",
    -707: "its lease has run out while it was read",
    -800: "the peer that holds it does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}
# At this and below, it is the master that failed, and not one key.
_MASTER = -900


def in_words(code: int) -> str:
    """What a code means, for an error's text."""
    return f"{_WORDS[code]} ({code})" if code in _WORDS else f"error {code}"


def check_master(codes: Sequence[int], count: int, where: str) -> Sequence[int]:
    """Return the codes, one for each of `count` keys. Raises `TierError` where the master did not answer."""
    if len(codes) != count:
        raise TierError(f"Mooncake answered {len(codes)} codes for {count} keys", where=where)
    if worst := min((code for code in codes if code <= _MASTER), default=0):
        raise TierError(in_words(worst), where=where)
    return codes


def of_contains(code: int) -> Outcome:
    return {1: Outcome.FOUND, 0: Outcome.MISSING}.get(code, Outcome.FAILED)


def of_put(code: int) -> Outcome:
    return Outcome.STORED if code == OK else Outcome.FAILED


def of_delete(code: int) -> Outcome:
    return {OK: Outcome.DELETED, NO_OBJECT: Outcome.MISSING}.get(code, Outcome.FAILED)
