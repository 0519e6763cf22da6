"""The helper process of a tier: makes the tier, and serves one call at a time on each connection that the server sends.

Values are in memory that it shares with the server (`tier_process_memory.py`).

Started by `tier_process_supervisor.py`. The end of the thread that started it ends it, and so does the end of the
control socket: then the tier is closed first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback

from kvframework.api.registered_memory import RegistersMemory
from kvframework.api.tier import Outcome, Tier
from kvframework.api.tier_process_calls import Answer, Call, read_call, read_start, write_answer
from kvframework.api.tier_process_memory import Connection, ValueMemory
from kvframework.errors import KVFrameworkError, TierError
from kvframework.parent_death import end_with_parent


def main(arguments: list[str]) -> None:
    """Runs the helper, which says first whether it has made the tier. The only argument is the number of the control
    socket's descriptor."""
    end_with_parent()
    with socket.socket(fileno=int(arguments[0])) as control:
        start = read_start(control)
        make, options = start.make.resolve()
        try:
            tier: Tier = make(options, start.where)
        except KVFrameworkError as error:
            _say(control, Answer(refusal=(error.fact, error.available, error.hint)))
            return
        _say(control, Answer())
        while True:
            word, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not word:
                break
            connection = Connection(socket.socket(fileno=descriptors[0]), ValueMemory(descriptors[1]))
            threading.Thread(target=_serve, args=(connection, tier), daemon=True).start()
    try:
        tier.close()
    finally:
        # Not by the interpreter's exit: a library's exit handlers may hang.
        os._exit(0)


def _say(control: socket.socket, answer: Answer) -> None:
    with contextlib.suppress(BrokenPipeError):  # the server may have closed it by now
        write_answer(control, answer)


def _serve(connection: Connection, tier: Tier) -> None:
    memory = connection.memory
    try:
        while True:
            call = read_call(connection.sock)
            write_answer(connection.sock, _answer(tier, call, memory))
    except (OSError, EOFError):
        return  # the server gave the call up, or has ended
    finally:
        try:
            _forget(tier, memory)
        finally:
            connection.close()


def _places(tier: Tier, memory: ValueMemory, sizes: list[int]) -> list[memoryview]:
    if not memory.has_room(sizes):
        _forget(tier, memory)
        memory.map()
        if isinstance(tier, RegistersMemory):
            try:
                tier.register_memory(memory.all())
            except BaseException:
                memory.unmap()
                raise
    return memory.values(sizes)


def _forget(tier: Tier, memory: ValueMemory) -> None:
    if isinstance(tier, RegistersMemory) and memory.nbytes:
        tier.unregister_memory(memory.all())
    memory.unmap()


def _answer(tier: Tier, call: Call, memory: ValueMemory) -> Answer:
    at = call.deadline
    try:
        values = _places(tier, memory, call.sizes)
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
