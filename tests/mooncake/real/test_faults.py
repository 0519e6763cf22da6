"""A Mooncake Store whose parts die or stand still: every call ends by its deadline, and all heals."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kvf_mooncake import MooncakeOptions, client
from kvf_mooncake.client import MooncakeHelperTier
from kvframework.api.tier import Outcome
from kvframework.errors import TierError
from tests.mooncake.real.store import MooncakeStore
from tests.support.processes import has_ended, send
from tests.support.waiting import wait_until

MIB = 1 << 20
VALUE = bytes(range(256)) * (MIB // 256)
# Seconds: the deadline of a call that fails by it, and by how much it may be late on a machine that does other things.
SHORT_S, LATE_S = 1.0, 3.0


def soon() -> float:
    return time.monotonic() + 60.0


def key(name: str) -> bytes:
    return name.encode().ljust(72, b".")


Opens = Callable[[MooncakeStore], MooncakeHelperTier]


@pytest.fixture
def opened() -> Iterator[Opens]:
    tiers: list[MooncakeHelperTier] = []

    def opens(store: MooncakeStore) -> MooncakeHelperTier:
        tiers.append(MooncakeHelperTier(MooncakeOptions(master=store.address), where="[[l2]] #1"))
        return tiers[-1]

    yield opens
    for tier in tiers:
        tier.close()


@pytest.fixture
def tier(store: MooncakeStore, opened: Opens) -> MooncakeHelperTier:
    tier = opened(store)
    put(tier, "before")
    return tier


def put(tier: MooncakeHelperTier, name: str, value: bytes = VALUE) -> None:
    assert tier.put([key(name)], [[memoryview(value)]], deadline=soon()) == [Outcome.STORED]


def get(tier: MooncakeHelperTier, name: str, deadline: float | None = None) -> bytes | Outcome:
    room = bytearray(MIB)
    (answer,) = tier.get_into([key(name)], [[memoryview(room)]], deadline=deadline or soon())
    return answer if isinstance(answer, Outcome) else bytes(room[:answer])


def works(tier: MooncakeHelperTier, name: str) -> bool:
    """Whether a value can be stored and loaded again."""
    with suppress(TierError):
        stored = tier.put([key(name)], [[memoryview(VALUE)]], deadline=time.monotonic() + 5)
        return stored == [Outcome.STORED] and get(tier, name) == VALUE
    return False


def fails_in_time(call: Callable[[float], object]) -> TierError:
    """Call with a short deadline, until a call fails as a whole: each ends in time."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        deadline = time.monotonic() + SHORT_S
        try:
            call(deadline)
        except TierError as error:
            return error
        finally:
            assert time.monotonic() < deadline + LATE_S
    pytest.fail("no call fails")


def test_a_peer_that_stands_still_costs_a_deadline_and_the_helper(
    store: MooncakeStore, tier: MooncakeHelperTier
) -> None:
    first = tier.pid
    assert first
    store.peers[0].sigstop()
    assert fails_in_time(lambda at: get(tier, "before", at))
    wait_until(lambda: has_ended(first))
    store.peers[0].sigcont()
    wait_until(lambda: works(tier, "after"))
    assert tier.pid != first


def test_nothing_arrives_after_the_end_of_a_call(store: MooncakeStore, tier: MooncakeHelperTier) -> None:
    """The peer goes on with what it was asked for, when the caller uses its buffers for something else."""
    rooms = [memoryview(bytearray(MIB)) for _ in range(8)]
    for index in range(len(rooms)):
        put(tier, str(index))
    store.peers[0].sigstop()
    keys = [key(str(index)) for index in range(len(rooms))]
    fails_in_time(lambda at: tier.get_into(keys, [[room] for room in rooms], deadline=at))
    for room in rooms:
        room[:] = bytes(MIB)
    store.peers[0].sigcont()
    wait_until(lambda: works(tier, "after"))
    assert [bytes(room) for room in rooms] == [bytes(MIB)] * len(rooms)


def test_a_dead_peers_values_are_no_values(store: MooncakeStore, tier: MooncakeHelperTier) -> None:
    store.peers[0].kill9()
    assert get(tier, "before") in (Outcome.FAILED, Outcome.MISSING)
    store.start_peer()
    wait_until(lambda: get(tier, "before") is Outcome.MISSING)
    wait_until(lambda: works(tier, "after"))


def test_a_master_that_stands_still(store: MooncakeStore, tier: MooncakeHelperTier) -> None:
    assert store.master
    store.master.sigstop()
    for call in (
        lambda at: tier.contains([key("before")], deadline=at),
        lambda at: get(tier, "before", at),
        lambda at: tier.put([key("n")], [[memoryview(VALUE)]], deadline=at),
        lambda at: tier.delete([key("before")], deadline=at),
    ):
        fails_in_time(call)
    store.master.sigcont()
    wait_until(lambda: works(tier, "after"))


def test_a_master_that_starts_again_has_forgotten_all(store: MooncakeStore, tier: MooncakeHelperTier) -> None:
    assert store.master
    store.master.kill9()
    fails_in_time(lambda at: tier.contains([key("before")], deadline=at))
    store.start_master()
    wait_until(lambda: works(tier, "after"))
    assert get(tier, "before") is Outcome.MISSING


def test_a_server_may_start_before_the_master(store: MooncakeStore, opened: Opens) -> None:
    """Mooncake's own client would hold the interpreter for a minute and a half."""
    assert store.master
    store.stop()
    tier = opened(store)
    fails_in_time(lambda at: tier.contains([key("before")], deadline=at))
    with pytest.raises(TierError, match=f"no mooncake_master answers at {store.address}: Connection refused; start it"):
        tier.contains([key("before")], deadline=soon())
    store.start_master()
    store.start_peer()
    wait_until(lambda: works(tier, "after"))


def test_a_master_that_never_speaks_costs_the_helper(opened: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's setup holds the interpreter of the helper, so that only a kill ends it."""
    monkeypatch.setattr(client, "_START_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = MooncakeOptions(master=f"127.0.0.1:{silent.getsockname()[1]}")
        tier = MooncakeHelperTier(options, where="[[l2]] #1")
        try:
            fails_in_time(lambda at: tier.contains([key("k")], deadline=at))
            with pytest.raises(TierError, match="the helper process was killed: not ready within 2 s"):
                tier.contains([key("k")], deadline=soon())
        finally:
            tier.close()


def test_a_helper_that_is_killed_in_the_middle_of_a_put(store: MooncakeStore, tier: MooncakeHelperTier) -> None:
    """What it had begun is a miss until it is stored again, by a client that the dead one does not delay."""
    store.peers[0].sigstop()
    fails_in_time(lambda at: tier.put([key("n")], [[memoryview(VALUE)]], deadline=at))
    pid = tier.pid
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    store.peers[0].sigcont()
    wait_until(lambda: works(tier, "n"))


def test_a_helper_that_stands_still(tier: MooncakeHelperTier) -> None:
    pid = tier.pid
    assert pid
    send(pid, signal.SIGSTOP)
    fails_in_time(lambda at: get(tier, "before", at))
    wait_until(lambda: has_ended(pid))
    wait_until(lambda: works(tier, "after"))
    assert get(tier, "before") == VALUE
