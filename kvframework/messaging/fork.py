"""Owns what a forked child does with inherited descriptors: it closes its copies, so only the parent's life counts.

A liveness socket says "this process lives"; a copy in a child would keep saying so for a dead parent.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ClosedInChild(Protocol):
    def close_in_child(self) -> None:
        """Closes descriptors and nothing else: no lock, no unlinking, no shutdown, nothing that the parent shares."""


_resources: weakref.WeakSet[ClosedInChild] = weakref.WeakSet()


def close_after_fork(resource: ClosedInChild) -> None:
    """Has `resource.close_in_child()` called in every child forked from now on, for as long as the resource lives."""
    _resources.add(resource)


def _after_fork_in_child() -> None:
    for resource in list(_resources):
        try:
            resource.close_in_child()
        except OSError:
            continue  # it was closed already; the others still have to be
    _resources.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
