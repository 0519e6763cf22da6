"""The W3C Trace Context of a request, as it rides in its cache keys: a `traceparent` header. Pure."""

from __future__ import annotations

import re

__all__ = ["TRACEPARENT_CHARACTERS", "sampled_parent"]

TRACEPARENT_CHARACTERS = 55
# Later versions may append fields behind a dash.
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LATEST = "00"
_SAMPLED = 1


def sampled_parent(traceparent: str) -> str:
    """Returns the `traceparent`, 55 characters of version 00, of a request that is sampled; "" for one that is not, and
    for what is no traceparent, which W3C wants ignored."""
    found = _FORM.match(traceparent)
    if found is None:
        return ""
    version, trace, span, flags = found.groups()
    more = traceparent[TRACEPARENT_CHARACTERS : TRACEPARENT_CHARACTERS + 1]
    known = not more if version == _LATEST else version != "ff" and more in ("", "-")
    if not known or not int(trace, 16) or not int(span, 16) or not int(flags, 16) & _SAMPLED:
        return ""
    return f"{_LATEST}-{trace}-{span}-{_SAMPLED:02x}"
