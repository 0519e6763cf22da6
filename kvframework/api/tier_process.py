"""The helper process of a tier: makes the tier, and serves one call at a time on each connection that the server sends.

Started by `tier_process_supervisor.py`. The end of the thread that started it ends it, and so does the end of the
control socket: then the tier is closed first.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import traceback

from kvframework.api.tier import Outcome, Tier
from kvframework.api.tier_process_calls import Answer, Call, read_call, read_start, receive_into, write_answer
from kvframework.errors import TierError
from kvframework.parent_death import end_with_parent


def main(arguments: list[str]) -> None:
    """Runs the helper. The only argument is the number of the control socket's descriptor."""
    end_with_parent()
    with socket.socket(fileno=int(arguments[0])) as control:
        start = read_start(control)
        make, options = start.make.resolve()
        tier: Tier = make(options, start.where)
        with contextlib.suppress(BrokenPipeError):  # the server may have closed it by now
            control.sendall(b"r")
        while True:
            word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not word:
                break
            connection = socket.socket(fileno=descriptors[0])
            threading.Thread(target=_serve, args=(connection, tier), daemon=True).start()
    try:
        tier.close()
    finally:
        # Not by the interpreter's exit: a library's exit handlers may hang.
        os._exit(0)


def _serve(sock: socket.socket, tier: Tier) -> None:
    memory = memoryview(bytearray())
    with sock:
        try:
            while True:
                call = read_call(sock)
                if sum(call.sizes) > memory.nbytes:
                    memory = memoryview(mmap.mmap(-1, sum(call.sizes)))
                values = _cut(memory, call.sizes)
                if call.name == "put":
                    for value in values:
                        receive_into(sock, [value], value.nbytes)
                answer = _answer(tier, call, values)
                received = zip(values, answer.outcomes, strict=False) if call.name == "get_into" else ()
                write_answer(sock, answer, [value[:n] for value, n in received if isinstance(n, int)])
        except (OSError, EOFError):
            return  # the server gave the call up, or has ended


def _cut(memory: memoryview, sizes: list[int]) -> list[memoryview]:
    values, at = [], 0
    for size in sizes:
        values.append(memory[at : at + size])
        at += size
    return values


def _answer(tier: Tier, call: Call, values: list[memoryview]) -> Answer:
    at = call.deadline
    try:
        if call.name == "get_into":
            return Answer([_plain(each) for each in tier.get_into(call.keys, [[v] for v in values], deadline=at)])
        if call.name == "put":
            return Answer([each.value for each in tier.put(call.keys, [[v] for v in values], deadline=at)])
        if call.name == "contains":
            return Answer([each.value for each in tier.contains(call.keys, deadline=at)])
        if call.name == "delete":
            return Answer([each.value for each in tier.delete(call.keys, deadline=at)])
        if call.name == "scan":
            return Answer(entries=[(each.key, each.nbytes, each.used_at) for each in tier.scan(deadline=at)])
        if call.name == "usage":
            usage = tier.usage(deadline=at)
            return Answer(usage=(int(usage.used_bytes), int(usage.capacity_bytes)))
        if call.name == "touch":
            tier.touch(call.keys, deadline=at)
        else:
            tier.ping(deadline=at)
    except TierError as error:
        return Answer(refusal=(error.fact, error.available, error.hint))
    except Exception as error:  # noqa: BLE001  a bug of the tier, which the server logs
        traceback.print_exc()
        return Answer(bug=f"{type(error).__name__} in the helper: {error}")
    return Answer()


def _plain(outcome: int | Outcome) -> int | str:
    return outcome.value if isinstance(outcome, Outcome) else outcome
