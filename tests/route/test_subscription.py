"""A subscription in this process, with a clock that the test sets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq.asyncio

from kvf_route.follower import Follower
from kvf_route.settings import Publisher
from kvf_route.subscription import SILENT_S, Intake, Subscription
from tests.route.publisher import ZmqPublisher, removed


class Batches:
    """Stands for `Contents`."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def steps(self, topic: bytes, payload: bytes) -> Iterator[None]:
        self.taken.append(payload)
        yield

    def clear(self) -> None:
        self.taken.clear()


def test_a_silent_publisher_is_asked_for_what_was_lost_last(tmp_path: Path) -> None:
    later = 0.0

    async def follow() -> None:
        nonlocal later
        sink = Batches()
        contents: Any = sink
        intake = Intake(contents)
        context = zmq.asyncio.Context()
        subscription = Subscription(
            context,
            Publisher(publisher.events, publisher.replay),
            Follower(intake, has_replay=True),
            intake,
            clock=lambda: time.monotonic() + later,
        )
        task = asyncio.create_task(subscription.run())
        try:
            publisher.publish(removed([1]))
            # The end of the first replay may come later than its batch.
            while len(sink.taken) != 1 or not subscription.in_step:
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
