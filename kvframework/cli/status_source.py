"""The connection of `kvframework status` to a server, and which server that is."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from kvframework.client.connection import ENDPOINT_VARIABLE, KVClient
from kvframework.config import default_endpoint, load_config
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m


def server_endpoint(endpoint: str | None, config: Path | None) -> str:
    """Return the endpoint of the server that a command addresses: the option, the variable, the configuration."""
    return endpoint or os.environ.get(ENDPOINT_VARIABLE) or load_config(config).server.endpoint or default_endpoint()


def quiet_connection() -> None:
    """Drop the connection's log lines, which would break the picture, or repeat the error."""
    logging.getLogger("kvframework").addHandler(logging.NullHandler())


class StatusSource:
    """Where documents come from. A client is kept while it works: after an error the next server may be another one,
    with another chunk size or hasher, and the next `ask` connects again."""

    def __init__(self, endpoint: str, timeout: float) -> None:
        self.endpoint = endpoint
        self._timeout = timeout
        self._client: KVClient | None = None
        self.round_trip_s: float | None = None

    def ask(self) -> bytes:
        """The status document; `round_trip_s` is measured before. Blocks for the timeout at most. Raises what
        `KVClient` does."""
        deadline = time.monotonic() + self._timeout
        if self._client is None:
            self._client = KVClient(self.endpoint, name="status", connect_timeout_s=self._timeout)
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
