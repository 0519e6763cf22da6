"""A process of an engine that moves its bytes itself, steered by a test: one JSON array a line comes in (a command and
its arguments), one JSON value goes out. It ends with its standard input.

Arguments: `scheduler` and the endpoint; or `worker` and the ticket of the arena, as the scheduler says it.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import msgspec

from kvframework.api.transport import StorePlan
from kvframework.client import KVClient
from kvframework.client.opaque import ArenaTicket, KeyGroup, OpaqueInstance, OpaqueObjects, Prompt, map_arena
from kvframework.wire.messages import Empty, Goodbye
from tests.support.waiting import wait_until

OBJECT, TOKENS = 32 << 10, 16


def objects(instance_id: int) -> OpaqueObjects:
    return OpaqueObjects(instance_id, "tiny", [OBJECT], TOKENS, "test-blocks")


def keys(prompt: int, chunks: int) -> tuple[KeyGroup]:
    digests = b"".join(hashlib.sha256(b"%d %d" % (prompt, chunk)).digest() for chunk in range(chunks))
    return (KeyGroup(digests, TOKENS),)


def about(prompt: int, chunks: int) -> Prompt:
    return Prompt(f"prompt {prompt}", 0, chunks * TOKENS)


class Scheduler:
    def __init__(self, endpoint: str) -> None:
        self.client = KVClient(endpoint, deadline_scale=20.0)
        assert self.client.wait_up(60)
        self.instance = OpaqueInstance(self.client, objects(77))
        self._registered()
        self._plan: StorePlan | None = None

    def ticket(self) -> list[str]:
        self._registered()
        ticket = self.instance.ticket
        assert ticket is not None
        return [ticket.path, ticket.session.hex(), ticket.boot_id.hex()]

    def reserve(self, prompt: int, chunks: int) -> list[int]:
        plan = self.instance.prepare_store(about(prompt, chunks), keys(prompt, chunks)).result(60)
        self._plan = plan
        return [place.offset for place in plan.ranges]

    def commit(self) -> int:
        plan, self._plan = self._plan, None
        assert plan is not None
        return plan.commit().result(60).stored

    def abort(self) -> None:
        assert self._plan is not None
        self._plan.abort()

    def goodbye(self) -> None:
        """A GOODBYE, as of a client in another language that ends well."""
        self.client.request("GOODBYE", Goodbye(), Empty)

    def _registered(self) -> None:
        wait_until(lambda: self.instance.is_ready, 60, "the registration")


class Worker:
    def __init__(self, ticket: str) -> None:
        path, session, boot = msgspec.json.decode(ticket)
        self._arena = map_arena(ArenaTicket(path, bytes.fromhex(session), bytes.fromhex(boot)), 60)

    def write(self, offsets: list[int], fill: int) -> None:
        for offset in offsets:
            self._arena.view[offset : offset + OBJECT] = bytes([fill]) * OBJECT

    def served(self) -> bool:
        return self._arena.is_served


def main() -> None:
    role, place = sys.argv[1:]
    program: Any = Scheduler(place) if role == "scheduler" else Worker(place)
    print(msgspec.json.encode("ready").decode(), flush=True)
    for line in sys.stdin:
        command, *arguments = msgspec.json.decode(line)
        print(msgspec.json.encode(getattr(program, command)(*arguments)).decode(), flush=True)


if __name__ == "__main__":
    main()
