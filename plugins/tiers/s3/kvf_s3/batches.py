"""A batch of requests, some at once, until a deadline. Runs in the event loop.

Requests for the same key follow each other in the order of the batch; those for different keys have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from kvf_s3.failures import LATE, Failure, understood
from kvframework.api.tier import Outcome, PackedKey

R = TypeVar("R")


async def ask_each(
    keys: Sequence[PackedKey],
    ask: Callable[[int], Awaitable[R | Failure]],
    *,
    at_once: int,
    deadline: float,
) -> list[R | Failure]:
    """The answer of `ask` for each index of `keys`; for what has no answer by the deadline a `Failure`. Ends shortly
    after the deadline, when every request that was cancelled has ended."""
    answers: list[R | Failure] = [LATE] * len(keys)
    waiting = _by_key(keys)

    async def work() -> None:
        for indices in waiting:
            for index in indices:
                try:
                    answers[index] = await ask(index)
                except Exception as error:  # noqa: BLE001  a failure of one request is that key's
                    answers[index] = understood(error)

    workers = [asyncio.ensure_future(work()) for _ in range(min(at_once, len(keys)))]
    try:
        await end_by(workers, deadline)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return answers


async def end_by(tasks: Sequence[asyncio.Future[None]], deadline: float) -> None:
    """Waits for the tasks, until the deadline at most."""
    if tasks:
        await asyncio.wait(tasks, timeout=max(deadline - asyncio.get_running_loop().time(), 0.0))


def settled(answers: Sequence[R | Outcome | Failure], where: str) -> list[R | Outcome]:
    """The answers, with FAILED for failures. Raises the `TierError` of the first failure if there is no answer at all,
    unless the store is just full."""
    failures = [each for each in answers if isinstance(each, Failure)]
    if failures and len(failures) == len(answers) and not all(each.full for each in failures):
        raise next(each for each in failures if not each.full).error(where)
    return [Outcome.FAILED if isinstance(each, Failure) else each for each in answers]


def _by_key(keys: Sequence[PackedKey]) -> Iterator[list[int]]:
    """The indices of each key."""
    indices: dict[PackedKey, list[int]] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, []).append(index)
    return iter(indices.values())
