"""Why the first missing chunk of a lookup missed."""

from __future__ import annotations

from typing import NamedTuple

# All reasons, in the order of docs/operations.md.
REASONS = (
    "never_stored",
    "dropped_full",
    "dropped_share",
    "evicted",
    "other_namespace",
    "other_salt",
    "too_short",
    "tier_down",
    "timed_out",
    "damaged",
    "cleared",
    "server_started",
    "unknown_namespace",
)


class Why(NamedTuple):
    """A reason, one of `REASONS`, and what else is known of it, in words."""

    reason: str
    detail: str = ""
