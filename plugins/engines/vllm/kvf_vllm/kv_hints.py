"""Retention in vLLM's `kv_hints`: what the envelope of a request says of how long its KV is of use. Pure.

The envelope is vLLM's (`vllm.v1.kv_hints`, from 0.32 on): actions with a type, a version and a payload, which vLLM
hands on unread. The action `kv.retain` is that of vLLM's proposals for retention; all others are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframework.api.retain import MAX_RETAINS, Retain, retain_of
from kvframework.errors import RequestError

TYPE, MAJOR = "kv.retain", "1"
# The longest time that `retain_of` takes.
_LONGEST_S = 3600.0


def retain_action(envelope: Any, prompt_tokens: int) -> tuple[Retain, ...]:
    """Return what the actions `kv.retain` of an envelope say, the first `MAX_RETAINS` ranges; () without any. Raises
    `RequestError`, which names what is wrong."""
    items: list[object] = []
    for action in getattr(envelope, "actions", None) or ():
        if action.action_type != TYPE:
            continue
        if str(action.action_version).partition(".")[0] != MAJOR:
            raise _wrong(f"version {str(action.action_version)[:20]!r}", f"{MAJOR}.x")
        directives = action.payload.get("directives") if isinstance(action.payload, Mapping) else None
        if not isinstance(directives, list):
            raise _wrong("a payload without a list `directives`", "a list of objects")
        items += directives[: MAX_RETAINS - len(items)]
    return retain_of([_range(item, prompt_tokens) for item in items])


def _range(item: object, prompt_tokens: int) -> object:
    """Return a directive as `retain_of` reads it. Theirs has no end of time where there is no `duration`; ours ends
    with the longest one."""
    if not isinstance(item, Mapping):
        raise _wrong(f"a directive {str(item)[:40]!r}", "an object")
    said = {key: value for key, value in item.items() if value is not None}
    if said.pop("covers_output", False) is True:
        said["start"] = prompt_tokens
    if "priority" not in said:
        raise _wrong("a directive without a priority", "0 to 100")
    duration = said.setdefault("duration", _LONGEST_S)
    if isinstance(duration, (int, float)) and duration > _LONGEST_S:
        said["duration"] = _LONGEST_S
    return {"start": 0, **said}


def _wrong(fact: str, expected: str) -> RequestError:
    return RequestError(fact, where=f"kv_hints, {TYPE}", available=expected, hint="see docs/hints.md")
