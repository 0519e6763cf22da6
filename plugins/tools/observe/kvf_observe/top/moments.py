"""Moments of a server, out of the polls of it: what there is to show, also while it does not answer. Pure."""

from __future__ import annotations

from kvf_observe.poller import Observed
from kvf_observe.top.minute import Minute, Window
from kvf_observe.top.picture import Shown


class Moments:
    """Takes every poll of the server at `endpoint`; `began` is when the looking began, by the wall clock."""

    def __init__(self, endpoint: str, began: float) -> None:
        self._endpoint = endpoint
        self._minute = Minute()
        self._answered = began
        self._window: Window | None = None
        self.latest = Shown(endpoint, None, began)

    def take(self, observed: Observed) -> Shown:
        """What there is to show after a poll: the last document is shown on while none follows it."""
        if observed.document is None:
            self.latest = Shown(self._endpoint, self._window, observed.time, self._answered, observed.error)
        else:
            self._answered = observed.time
            self._window = self._minute.add(observed.document, observed.at)
            self.latest = Shown(self._endpoint, self._window, observed.time)
        return self.latest
