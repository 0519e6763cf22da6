"""A subscription in this process, with a clock that the test sets."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import zmq.asyncio

from kvframework.route.follower import Follower
from kvframework.route.settings import Publisher
from kvframework.route.subscription import SILENT_S, Subscription
from tests.route.publisher import ZmqPublisher, removed


class Batches:
    """A sink."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def apply(self, topic: bytes, payload: bytes) -> None:
        self.taken.append(payload)

    def clear(self) -> None:
        self.taken.clear()


def test_a_silent_publisher_is_asked_for_what_was_lost_last(tmp_path: Path) -> None:
    later = 0.0

    async def follow() -> None:
        nonlocal later
        sink = Batches()
        context = zmq.asyncio.Context()
        subscription = Subscription(
            context,
            Publisher(publisher.events, publisher.replay),
            Follower(sink, has_replay=True),
            clock=lambda: time.monotonic() + later,
        )
        task = asyncio.create_task(subscription.run())
        try:
            publisher.publish(removed([1]))
            while len(sink.taken) != 1:
                await asyncio.sleep(0.01)
            publisher.lose(removed([2]))
            later += SILENT_S
            while len(sink.taken) != 2:
                await asyncio.sleep(0.01)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            context.destroy(linger=0)

    with ZmqPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay") as publisher:
        asyncio.run(asyncio.wait_for(follow(), 60))
