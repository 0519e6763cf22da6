"""The calls of server-driven transports: STORE and RETRIEVE carry block ids, and the server moves the bytes, see
`ServerDrivenLink`.

A future of a transfer resolves only once the server no longer touches the engine's blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvframework.api.futures import Future, Promise, StreamHook
from kvframework.api.transport import LoadOutcome, Registration, ServerDrivenLink, StoreOutcome, Transfer
from kvframework.client.calls import ServerCalls
from kvframework.client.replies import as_response
from kvframework.errors import DeadlineExceeded, KVFrameworkError
from kvframework.logs.limit import LogLimit
from kvframework.messaging.client.pending import Answer
from kvframework.wire import messages as m
from kvframework.wire.indices import pack_block_ids

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

R = TypeVar("R")


class ServerDrivenCalls(ServerCalls, ServerDrivenLink):
    """The requests of the server-driven path."""

    def store(
        self, transfer: Transfer, *, event: bytes = b"", stream_hook: StreamHook | None = None
    ) -> Future[StoreOutcome]:
        return self._server_driven(
            "STORE", transfer, 0, event, stream_hook, outcome_of=partial(_stored, transfer), failed=transfer.failed
        )

    def load(
        self, transfer: Transfer, skip_tokens: int, *, event: bytes = b"", stream_hook: StreamHook | None = None
    ) -> Future[LoadOutcome]:
        return self._server_driven(
            "RETRIEVE",
            transfer,
            skip_tokens,
            event,
            stream_hook,
            outcome_of=lambda reply: LoadOutcome(reply.ok, reply.reason),
            failed=LoadOutcome.failed,
        )

    def gather_block(self, registration: Registration, blocks: Sequence[int], event: bytes) -> list[bytes]:
        payload = m.GatherBlock(registration.instance_id, pack_block_ids([[block] for block in blocks]), event)
        # Urgent, since a reconnect asks this too.
        return list(self.request("GATHER_BLOCK", payload, m.GatheredBlock, urgent=True).groups)

    def _server_driven(
        self,
        name: str,
        transfer: Transfer,
        skip_tokens: int,
        event: bytes,
        stream_hook: StreamHook | None,
        *,
        outcome_of: Callable[[m.TransferReply], R],
        failed: Callable[[BaseException], R],
    ) -> Future[R]:
        packed = pack_block_ids(transfer.block_ids)
        instance_id = transfer.registration.instance_id
        payload = m.TransferRequest(transfer.key, instance_id, packed, event, skip_tokens, transfer.content)
        deadlines = self.deadlines
        silence_s = deadlines.store_s if name == "STORE" else deadlines.load_s
        sent = self._connection.request(name, payload, timeout=deadlines.of(name), silence_s=silence_s)
        future: Promise[R] = Promise(sent.cancel, stream_hook=stream_hook)

        def answered(reply: Future[Answer]) -> None:
            error = reply.exception()
            if error is None:
                try:
                    result = outcome_of(as_response(reply.result(0).payload, m.TransferReply))
                except KVFrameworkError as failure:
                    result = failed(failure)
                future.set_result(result)
                return
            log.warning("%s of request %s failed: %s", name, transfer.request_id, error)
            result = failed(error)
            if isinstance(error, DeadlineExceeded):
                self._when_untouched(sent, lambda: future.set_result(result))
                # Last, since it may raise an error of the device's driver.
                future.expire_holds()
            else:
                future.set_result(result)

        sent.add_done_callback(answered)
        return future

    def _when_untouched(self, sent: Future[Answer], then: Callable[[], object]) -> None:
        """After a deadline the server may still touch the blocks: cancel the request, and call `then` once the server
        no longer touches them, or has ended. Runs in the connection's I/O thread."""

        def answered(cancel: Future[Answer]) -> None:
            if isinstance(cancel.exception(), DeadlineExceeded):
                self._when_untouched(sent, then)
            else:
                then()

        self._connection.cancel(sent).add_done_callback(answered)


def _stored(transfer: Transfer, reply: m.TransferReply) -> StoreOutcome:
    if reply.ok or not reply.outcome.ok:
        return reply.outcome
    return StoreOutcome(dropped=transfer.objects)
