"""Owns pipelining: many commands in one flight, with a bound on what is under way. Runs in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvf_redis.wire import Wire
from kvframework.api import Buffer

# Enough to fill a fast link. More is slower: the server keeps unread replies in memory, which leaves its caches
# (measured with values of 4 MiB: 16 MiB halves the speed of GET on one machine).
MAX_BYTES = 8 << 20
MAX_COMMANDS = 256


def fly(
    wire: Wire,
    costs: Sequence[int],
    command: Callable[[int], Iterable[Buffer]],
    read: Callable[[int], None],
    deadline: float,
) -> None:
    """Sends one command for each of `costs` (its bytes, or those of its reply) and reads the replies in order.

    `command(i)` gives the buffers of command i, borrowed until they are sent; `read(i)` consumes its reply. At least
    one command is under way, whatever it costs. More are sent only when half of the bound is free, so that small ones
    travel together.
    """
    sent = done = in_flight = 0
    while done < len(costs):
        buffers: list[Buffer] = []
        if in_flight <= MAX_BYTES // 2 and sent - done <= MAX_COMMANDS // 2:
            while sent < len(costs) and sent - done < MAX_COMMANDS:
                if sent > done and in_flight + costs[sent] > MAX_BYTES:
                    break
                buffers.extend(command(sent))
                in_flight += costs[sent]
                sent += 1
        if buffers:
            wire.send(buffers, deadline)
        read(done)
        in_flight -= costs[done]
        done += 1
