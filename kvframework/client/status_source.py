"""Status documents of a running server, for commands and for `kvframework observe`."""

from __future__ import annotations

import time

from kvframework.client.connection import KVClient
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m


class StatusSource:
    """Where documents come from. A client is kept while it works: after an error the next server may be another one,
    with another chunk size or hasher, and the next `ask` connects again. `round_trip_s` is that of the last `ask`, None
    if the serving loop did not answer it."""

    def __init__(self, endpoint: str, timeout: float, *, name: str = "status") -> None:
        self.endpoint = endpoint
        self._timeout = timeout
        self._name = name
        self._client: KVClient | None = None
        self.round_trip_s: float | None = None

    def ask(self) -> bytes:
        """The status document; `round_trip_s` is measured before. Blocks for the timeout at most. Raises what
        `KVClient` does."""
        deadline = time.monotonic() + self._timeout
        self.round_trip_s = None
        if self._client is None:
            self._client = KVClient(self.endpoint, name=self._name, connect_timeout_s=self._timeout)
        try:
            _ = self._client.hello
            self.round_trip_s = self._client.ping(max(deadline - time.monotonic(), 0.01))
            left = max(deadline - time.monotonic(), 0.01)
            return self._client.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=left).document
        except KVFrameworkError:
            self.close()
            raise

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
