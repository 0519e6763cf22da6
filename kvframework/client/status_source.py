"""What a running server says of itself and drops, for commands and, again and again, for `kvframework observe`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvframework.client.kv_client import KVClient
from kvframework.client.session import ENDPOINT_VARIABLE
from kvframework.config.endpoint import default_endpoint
from kvframework.config.load import load_config
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m


def server_endpoint(endpoint: str | None, config: Path | None) -> str:
    """Return the endpoint of the server that a command addresses: the option, the variable, the configuration."""
    return endpoint or os.environ.get(ENDPOINT_VARIABLE) or load_config(config).server.endpoint or default_endpoint()


def quiet_connection() -> None:
    """Drop the connection's log lines, which would break the picture, or repeat the error."""
    logging.getLogger("kvframework").addHandler(logging.NullHandler())


class StatusSource:
    """Where the answers come from. A client is kept while it works: after an error the next server may be another one,
    with other names of objects, and the next `ask` connects again. `round_trip_s` is that of the last `ask`, None
    if the serving loop did not answer it."""

    def __init__(self, endpoint: str, timeout: float, *, name: str = "status") -> None:
        self.endpoint = endpoint
        self._timeout = timeout
        self._name = name
        self._client: KVClient | None = None
        self.round_trip_s: float | None = None

    def ask(self) -> bytes:
        """The status document; measures `round_trip_s` before. Blocks for the timeout at most. Raises as `KVClient`."""
        self.round_trip_s = None
        with self._connected() as (client, left):
            self.round_trip_s = client.ping(left())
            return client.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=left()).document

    def finished(self, after: int = 0, *, request_id: str = "", traced: bool = False) -> m.RecentReply:
        """The finished requests behind the number `after`, of them those of an id, or those with a trace, which have
        numbers of their own. Blocks and raises as `ask`."""
        with self._connected() as (client, left):
            asked = m.Recent(after, request_id=request_id, traced=traced)
            return client.request("RECENT", asked, m.RecentReply, timeout=left())

    def dump(self) -> bytes:
        """What only the server knows for a bug report, as JSON without secrets. Blocks and raises as `ask`."""
        with self._connected() as (client, left):
            return client.request("DUMP", m.Empty(), m.DumpReply, timeout=left()).document

    def clear(self, *, l2: bool = False, model: str = "", timeout: float) -> m.Cleared:
        """Drop what nothing uses of L1, and with `l2` of all tiers: of one model, or all. Blocks for `timeout` seconds
        at most, and raises as `ask`."""
        with self._connected() as (client, _):
            return client.request("CLEAR", m.Clear(l2=l2, model=model), m.Cleared, timeout=timeout)

    def forget(self, order: m.Forget, *, timeout: float) -> m.Forgotten:
        """Delete what an order names from L1 and every tier; return the receipt. Blocks for `timeout` seconds at most,
        and raises as `ask`; the server goes on with an order whose answer came too late."""
        with self._connected() as (client, _):
            return client.request("FORGET", order, m.Forgotten, timeout=timeout)

    def drain(self, within_s: float) -> bytes:
        """Have the server drain within that time, and end; return `status.Drain`. Blocks and raises as `ask`."""
        with self._connected() as (client, left):
            return client.request("DRAIN", m.Drain(within_s), m.StatusReply, timeout=left()).document

    @contextlib.contextmanager
    def _connected(self) -> Iterator[tuple[KVClient, Callable[[], float]]]:
        """The client, and how many seconds are left for it."""
        deadline = time.monotonic() + self._timeout
        if self._client is None:
            self._client = KVClient(self.endpoint, name=self._name, connect_timeout_s=self._timeout)
        try:
            _ = self._client.hello
            yield self._client, lambda: max(deadline - time.monotonic(), 0.01)
        except KVFrameworkError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, if there is one. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
