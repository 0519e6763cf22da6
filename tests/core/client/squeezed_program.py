"""An engine's process with few descriptors or threads left: its lookups are misses, and it lives.

Usage: squeezed_program.py DEED ENDPOINT [FREE ...]. `start`: makes a client with so many descriptors free, each number
in turn. `reconnect`: says "squeezed" each time that a connected client has so few, then reads a line.
`threads`: makes a client while this user may have no further thread.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Iterator

from kvframework.api.hasher import HasherProvider
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter
from kvframework.errors import OutOfResources
from kvframework.registry.registry import PluginRegistry
from tests.support.waiting import wait_until

NOBODY = 65534


@contextlib.contextmanager
def left(free: int) -> Iterator[None]:
    """So many descriptors may still be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = []
    while not fillers or fillers[-1] < highest:  # the lowest number that is free is taken first
        fillers.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1 + free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for filler in fillers:
            os.close(filler)


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """For another user than root, whom no such limit binds."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, before)


def lookup(client: KVClient, hashes: RequestHashes) -> int:
    adapter = SchedulerAdapter(client, model_name="m", namespace=bytes(16), chunk_tokens=256)
    return adapter.lookup(hashes).hit_tokens


def start(endpoint: str, hashes: RequestHashes, *free: str) -> None:
    for number in map(int, free):
        with left(number):
            client = KVClient(endpoint)
            connection = client._connection
            wait_until(lambda connection=connection: connection.last_error)  # type: ignore[misc]
            assert isinstance(connection.last_error, OutOfResources), connection.last_error
            assert lookup(client, hashes) == 0
        with client:
            if str(number) in (free[0], free[-1]):
                assert client.wait_up(20), client._connection.last_error


def reconnect(endpoint: str, hashes: RequestHashes, *free: str) -> None:
    with KVClient(endpoint) as client:
        for number in map(int, free):
            assert client.wait_up(20), client._connection.last_error
            boot_id = client.boot_id
            with left(number):
                say("squeezed")
                sys.stdin.readline()  # the server was restarted
                # The connection that is over has left some.
                wait_until(lambda: isinstance(client._connection.last_error, OutOfResources) or client.usable)
                assert lookup(client, hashes) == 0
            assert client.wait_up(20), client._connection.last_error
            assert client.boot_id != boot_id


def threads(endpoint: str, hashes: RequestHashes) -> None:
    # The threads of a context that starts just as the limit comes would be counted and then refused.
    with KVClient(endpoint) as before:
        assert before.wait_up(20), before._connection.last_error
    with no_more_threads():
        try:
            threading.Thread(target=int).start()
        except RuntimeError:
            pass
        else:
            say("no limit binds here")
            sys.exit()
        client = KVClient(endpoint)
        assert not client.wait_up(0.5)
        assert isinstance(client._connection.last_error, OutOfResources), client._connection.last_error
        assert lookup(client, hashes) == 0
        assert not client.usable
    # Only root's server is there, and this is somebody else by now: but there is a thread that finds that out.
    wait_until(lambda: not client.usable and not isinstance(client._connection.last_error, OutOfResources))
    client.close()


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(deed: str, endpoint: str, *free: str) -> None:
    plugins = PluginRegistry()
    provider = plugins.resolve("hasher", "sha256", where="here")
    assert isinstance(provider, HasherProvider)
    hashes = RequestHashes(provider.create(plugins.options(provider, {}, where="here")), 256, request_id="r")
    hashes.extend(list(range(1024)))
    with KVClient("ipc:///nowhere/at/all") as warm:
        wait_until(lambda: warm._connection.last_error)  # whatever is imported late, is imported now
    {"start": start, "reconnect": reconnect, "threads": threads}[deed](endpoint, hashes, *free)
    say("lives")


if __name__ == "__main__":
    main(*sys.argv[1:])
