"""Descriptors in a forked child: it closes its inherited copies, so that only the parent's life counts.

A liveness socket shows that this process lives; a copy in a child would still show that after the parent's death.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ClosedInChild(Protocol):
    def close_in_child(self) -> None:
        """Close descriptors and nothing else: no lock, no unlinking, no shutdown, nothing that the parent shares."""


_resources: weakref.WeakSet[ClosedInChild] = weakref.WeakSet()


def close_after_fork(resource: ClosedInChild) -> None:
    """Make every child forked from now on call `resource.close_in_child()`, as long as the resource lives."""
    _resources.add(resource)


def _after_fork_in_child() -> None:
    for resource in list(_resources):
        try:
            resource.close_in_child()
        except OSError:
            continue  # it was closed already; the others must still be closed
    _resources.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
