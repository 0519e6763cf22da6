"""A client process that a test steers: one JSON array a line comes in (a command and its arguments), one JSON value
goes out. Prompts are `[token, chunks]`: that token, so many chunks long.

Arguments: the endpoint and the instance id. It ends with its standard input.
"""

from __future__ import annotations

import sys

import msgspec

from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from kvframework.wire.messages import StorePlan
from tests.support.wire_client import WireClient, key_for

CHUNK = 256


class Program:
    """The commands. A store that was prepared stays the one that `write`, `commit` and `abort` mean."""

    def __init__(self, endpoint: str, instance_id: int) -> None:
        self.client = WireClient(endpoint, timeout=60.0)
        self.instance_id = instance_id
        self.registered = self.client.register(instance_id)
        self.plan: StorePlan | None = None

    def prepare_store(self, token: int, chunks: int) -> list[int]:
        """Objects placed, present, in flight elsewhere, dropped."""
        key = key_for(self.registered, [token] * CHUNK * chunks)
        self.plan = self.client.prepare_store(key, self.instance_id)
        outcome = self.plan.outcome
        return [len(self.plan.ranges), outcome.present, outcome.in_flight, outcome.dropped]

    def write(self, fill: str) -> None:
        assert self.plan is not None
        self.client.write(self.plan, fill.encode())

    def commit(self) -> int:
        """Objects published."""
        assert self.plan is not None
        committed: m.Committed = self.client.call("COMMIT_STORE", m.LeaseRef(self.plan.lease))
        return committed.outcome.stored

    def abort(self) -> int:
        """Objects freed."""
        assert self.plan is not None
        aborted: m.Aborted = self.client.call("ABORT", m.LeaseRef(self.plan.lease))
        return aborted.freed


COMMANDS = ("prepare_store", "write", "commit", "abort")


def main(endpoint: str, instance_id: str) -> None:
    program = Program(endpoint, int(instance_id))
    print("null", flush=True)
    for line in sys.stdin:
        command, *arguments = msgspec.json.decode(line)
        assert command in COMMANDS
        try:
            answer = getattr(program, command)(*arguments)
        except KVFrameworkError as error:
            answer = {"error": error.code, "fact": error.fact}
        print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
