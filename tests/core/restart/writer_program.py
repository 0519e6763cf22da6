"""An engine process with ranges that it may write. Arguments: endpoint, and what it does: "waits", or "forks" a child
that lives as long as its standard input.

It says JSON lines: its ranges; after a line that it reads, that it has written them, and whether it has connected to
another server meanwhile; after another line, that its copy has ended."""

from __future__ import annotations

import json
import os
import sys

from kvframework.api.keys import CacheKey
from kvframework.client import KVClient
from tests.support.wire_client import key_for, register_tiny

TOKENS = [9] * 1024
LATE = b"late"


def say(**facts: object) -> None:
    # As one write: parent and child share the pipe.
    os.write(1, json.dumps({"pid": os.getpid(), **facts}).encode() + b"\n")


def main(endpoint: str, how: str) -> None:
    with KVClient(endpoint, deadline_scale=20.0, connect_timeout_s=60.0) as client:
        assert client.wait_up(60.0)
        instance = register_tiny(client, 90)
        key: CacheKey = key_for(instance.registration, TOKENS)
        with client.prepare_store(instance.transfer(key)).result(60.0) as plan:
            if how == "forks" and os.fork() == 0:
                say(child=True)
                sys.stdin.read()
                os._exit(0)
            first = client.boot_id
            say(ranges=[(place.offset, place.length) for place in plan.ranges])
            sys.stdin.readline()
            reconnected = client.wait_up(60.0) and client.boot_id != first
            for place in plan.ranges:
                plan.arena[place.offset : place.offset + place.length] = LATE * (place.length // len(LATE))
            stored = plan.commit().result(60.0).stored
            say(reconnected=reconnected, stored=stored)
            sys.stdin.readline()
            del place
        del plan
        say(ended=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
