"""The second socket of a session, for bulk: big frames use it, so that no small request waits behind them.

The first thread that needs it opens it, and any failure on it discards it: its requests in flight fail with
`ServerGone`, and no late frame of it can pass for another answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvframework.api.futures import Future
from kvframework.api.requests import Buffer, Message, RequestSpec
from kvframework.errors import KVFrameworkError, OutOfResources, ServerFull, ServerGone
from kvframework.messaging import frames_io
from kvframework.messaging.client.link import Link
from kvframework.messaging.client.liveness import Heartbeat
from kvframework.messaging.client.pending import Answer
from kvframework.messaging.descriptors import FOR_A_CONNECTION, as_out_of_resources, need

# The control socket monitors whether the server lives; a PING would wait behind the bulk.
_PING_S = 3600.0


class BulkSocket:
    """The bulk socket of the session of the `control` link, which ends with it. Thread-safe.

    `join()` makes a DEALER that has joined the session; it blocks for one handshake.
    """

    def __init__(self, control: Link, join: Callable[[], frames_io.Socket]) -> None:
        self._control = control
        self._join = join
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False

    def submit(self, spec: RequestSpec, payload: Message, buffers: Sequence[Buffer], timeout: float) -> Future[Answer]:
        """Submit like `Link.submit`, after a handshake if there is no socket. Never raises."""
        try:
            link = self._opened()
        except KVFrameworkError as error:
            # These errors would refuse a new session too.
            if not isinstance(error, (ServerGone, ServerFull, OutOfResources)):
                self._control.close()  # the session refuses another socket: only a new session can help
            return Future.failed(error.with_traceback(None))
        except Exception as error:
            out = as_out_of_resources(error)
            if out is None:
                raise
            return Future.failed(out)
        return link.submit(spec, payload, buffers, timeout)

    def close(self) -> None:
        """Close the socket. Idempotent. Waits for a handshake in progress."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.close()

    def _opened(self) -> Link:
        with self._lock:
            if self._closed or not self._control.alive:
                raise ServerGone("the connection was closed")
            link = self._link
            if link is not None and link.alive and not link.suspect:
                return link
            if link is not None:
                link.close()
            need(descriptors=FOR_A_CONNECTION)
            heartbeat = Heartbeat(_PING_S, _PING_S, time.monotonic())
            dealer = self._join()
            try:
                link = Link(dealer, None, self._control.boot_id, heartbeat, lambda: None)
                link.start()
            except BaseException:
                dealer.close(0)
                raise
            self._link = link
            return link
