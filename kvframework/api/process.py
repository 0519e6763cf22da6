"""Child processes, and the delay before the next attempt of anything.

`SupervisedChild` is for code that can freeze or crash a process: it runs in one of its own, which can be killed.
`kvframework.api.helper_tier.HelperTier` does that for a tier. `Backoff` is for whatever is tried again: a
connection, a registration, a store.
"""

from __future__ import annotations

from kvframework.supervise.child import SupervisedChild, end_with_parent, start_connected, start_process
from kvframework.supervise.state import Backoff, how_ended

__all__ = ["Backoff", "SupervisedChild", "end_with_parent", "how_ended", "start_connected", "start_process"]
