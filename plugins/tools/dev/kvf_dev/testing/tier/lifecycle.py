"""Tests of a tier's end, of leaks, of the values that outlive it; and of a writer that is killed."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from kvf_dev.testing.faults import WIRE_FAULTS, FaultProxy
from kvf_dev.testing.kit import T, held, must_be_equal, wait_until
from kvf_dev.testing.tier.concurrency import Held
from kvf_dev.testing.tier.kit import DELETED, EVERY_CALL, MISSING, TierKit, WatchedTier, parts_of
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry
from kvframework.errors import TierError
from kvframework.supervise.child import plain

_KILLS = 4
# The length of each value, by the byte that it repeats; each key repeats one of the bytes, too.
_LENGTHS = {1: 1_000_000, 2: 3_000_001, 3: 5}
_KEYS = [bytes([number]) * 72 for number in _LENGTHS]
_WRITER = """
import itertools, sys, time
sys.path[:] = sys.argv[1:]
import msgspec
from kvframework.api.tier import TableContext
from kvframework.registry.registry import PluginRegistry
use, raw, keys, lengths = msgspec.msgpack.decode(sys.stdin.buffer.read())
registry = PluginRegistry()
provider = registry.resolve("tier", use)
tier = provider.create(registry.options(provider, raw, where="the kit"), TableContext("[[l2]] #1"))
for number, length in itertools.cycle(lengths.items()):
    tier.put(keys, [[memoryview(bytes([number]) * length)] for _ in keys], deadline=time.monotonic() + 60)
    print(number, flush=True)
"""


class LifecycleTests(TierKit):
    """`close` is idempotent, and calls in flight fail with `TierError`."""

    @pytest.mark.parametrize("name", EVERY_CALL)
    def test_a_closed_tier_fails_every_call(self, watched: WatchedTier, name: str) -> None:
        (key,) = self.fresh_keys(1)
        watched.store(key, b"value")
        watched.close()
        self.must_raise(name, lambda: self.call(watched, name, key), "the tier is closed")

    @pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
    def test_closing_twice_is_closing_once(self, watched: WatchedTier, used: bool) -> None:
        (key,) = self.fresh_keys(1)
        if used:
            watched.store(key, b"value")
            self.in_threads(watched.close, watched.close, watched.close)
        watched.close()
        watched.close()
        self.must_raise("contains", lambda: watched.contains([key]), "the tier is closed")

    @pytest.mark.parametrize("name", ["get_into", "put"])
    def test_closing_ends_the_calls_in_flight(self, watched: WatchedTier, name: str) -> None:
        """A call in its middle ends with `TierError`, or as if `close` had come later: a mapping stays until then."""
        values = [os.urandom(100_000) for _ in range(20)]
        keys = self.fresh_keys(len(values))
        watched.store_all(dict(zip(keys, values, strict=True)))
        held = Held([bytearray(value) if name == "put" else bytearray(len(value)) for value in values], self.patience_s)
        ended: list[float] = []

        def call() -> None:
            outcomes: list[object] = []
            with contextlib.suppress(TierError):
                outcomes = getattr(watched, name)(keys, held)
            held.reached.set()  # for a tier that does not iterate over the list
            ended.append(time.monotonic())
            for value, outcome, part in zip(values, outcomes, held, strict=False):
                if outcome == len(value):
                    must_be_equal(part[0], value, "`get_into` returned other bytes as the tier was closed")

        def close() -> None:
            held.reached.wait(self.patience_s)
            later = threading.Timer(self.grace_s / 4, held.go.set)  # for a tier whose `close` waits for its calls
            later.start()
            closed = time.monotonic()
            try:
                watched.close()
            finally:
                held.go.set()
                later.cancel()
            ended.append(closed)
            assert time.monotonic() - closed < self.grace_s, "The tier's `close` took too long"

        self.in_threads(call, close)
        assert max(ended) - min(ended) < self.grace_s, "A call of the tier went on after close"

    def test_a_second_opener_damages_nothing(self, watched: WatchedTier) -> None:
        """It may be refused. Where it is not, both tiers work, and a third finds what both have stored."""
        mine, later, others = ((key, os.urandom(5000)) for key in self.fresh_keys(3))
        watched.store(*mine)
        second = self.second(watched)
        watched.store(*later)
        kept = [mine, later]
        if second is not None:
            second.store(*others)
            second.close()
            kept += [others] * (self.persistent or self.is_shared)
        for key, value in (mine, later):
            watched.must_load(key, value, "A second opener of the store took a value from the first")
        watched.close()
        if self.persistent:
            third = self.another(watched)
            for key, value in kept:
                third.must_load(key, value, "A value is missing after two tiers had the store open at once")

    def test_damage_below_the_tier_is_no_miss(self, watched: WatchedTier) -> None:
        """The server deletes what is DAMAGED and reports what FAILED; of what is MISSING it knows nothing."""
        (key, other), value = self.fresh_keys(2), os.urandom(100_000)
        watched.store_all({key: value, other: value})
        self.damage(watched.inner, key)
        outcome: object = Outcome.FAILED
        with contextlib.suppress(TierError):
            outcome, _ = watched.load(key, len(value))
        assert outcome is not MISSING, (
            "`get_into` returned MISSING for a damaged value; it must return DAMAGED or FAILED"
        )
        watched.must_load(other, value, "Damage of one value took another value from the tier")
        watched.store(key, b"again")
        watched.must_load(key, b"again", "A damaged value cannot be replaced")

    def test_values_outlive_the_tier(self, watched: WatchedTier) -> None:
        if not self.persistent:
            pytest.skip("The test class sets `persistent = False`")
        sizes = (0, 1, 5000, 1 << 20)
        values = {key: os.urandom(size) for key, size in zip(self.fresh_keys(len(sizes)), sizes, strict=True)}
        (gone,) = self.fresh_keys(1)
        empty, _ = self._seen(watched, values)  # what is counted from the first call on would be nothing later
        watched.store_all({**values, gone: b"gone"})
        assert watched.delete([gone]) == [DELETED]
        used, before = self._seen(watched, values)
        time.sleep(3 * self.time_step_s)  # so that the time of opening is another one
        watched.close()
        again = self.another(watched)
        for key, value in values.items():
            again.must_load(key, value)
        assert again.contains([gone]) == [MISSING]
        then, after = self._seen(again, values)
        assert then == used, "`usage` changed when the store was opened again"
        assert {key: entry.nbytes for key, entry in after.items()} == {
            key: entry.nbytes for key, entry in before.items()
        }, "`scan` lists other values after the store was opened again"
        for key, entry in before.items():
            moved = 0.0 if entry.used_at is None else abs((after[key].used_at or 0.0) - entry.used_at)
            assert moved <= self.time_step_s, f"Opening the store again moved used_at by {moved:.1f} s"
        again.store(gone, b"a value of the next life")
        again.close()
        third = self.another(watched)
        third.must_load(gone, b"a value of the next life")
        assert third.delete([*values, gone]) == [DELETED] * (len(values) + 1)
        left = self._seen(third, values)[0] - empty
        assert left <= 0, f"The tier's used_bytes are {left} too high after all values were deleted"

    def _seen(self, tier: WatchedTier, values: dict[bytes, bytes]) -> tuple[int, dict[bytes, TierEntry]]:
        known = tier.capabilities()
        return (tier.usage().used_bytes if "usage" in known else 0, tier.listed(values) if "scan" in known else {})


class LeakTests(TierKit):
    """With `reopen`, files and threads are counted over several tiers; else before and after one, and nothing that the
    `tier` fixture depends on may open files or start threads in this process."""

    @pytest.fixture
    def before(self) -> set[str]:
        return held()

    def a_life(self, tier: WatchedTier) -> None:

        def work() -> None:
            keys = self.fresh_keys(5)
            tier.put(keys, parts_of([b"v" * 1000] * 5))
            for room in (1000, 10):
                tier.get_into(keys, parts_of(bytearray(room) for _ in keys))
            tier.contains(self.fresh_keys(2))
            tier.delete(keys)
            self.must_raise("put", lambda: tier.put(keys, [[]] * 5, deadline=0.0), "the call's deadline has passed")

        self.in_threads(work, work, work)
        tier.close()

    def test_closing_gives_files_and_threads_back(self, before: set[str], watched: WatchedTier) -> None:
        self.a_life(watched)
        if self.can_reopen:
            before = held()  # the process now holds all that it keeps for any number of tiers
            for _ in range(3):
                self.a_life(self.watch(self.reopen(watched.inner)))
        deadline = time.monotonic() + self.grace_s
        while len(left := held()) > len(before) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(left) <= len(before), f"The tier left open after close: {', '.join(sorted(left - before))}"


class CrashTests(TierKit):
    """A value is visible whole or not at all, also to other processes and after a crash."""

    def test_a_writer_that_is_killed_leaves_whole_values(self) -> None:
        """With `use`: another process makes the tier by its name and options."""
        if not (self.use and (self.persistent or self.is_shared)):
            pytest.skip("The tier is not persistent, or `use` is not set")
        self.resolve()
        chance = random.Random(5)  # noqa: S311  moments to kill at
        for _ in range(_KILLS):
            with self._writer() as writer:
                assert writer.stdout is not None
                started = writer.stdout.readline()
                began = time.monotonic()
                writer.stdout.readline()
                time.sleep(chance.random() * 2 * (time.monotonic() - began))  # so long as a put takes here
                writer.kill()
            assert started, "A tier in another process cannot write to the store"
            with contextlib.closing(self.watch(self.open_by_name())) as again:
                self._must_be_whole(again)
        with contextlib.closing(self.watch(self.open_by_name())) as again:
            for key in _KEYS:
                again.store(key, b"after the crash")
                again.must_load(key, b"after the crash", "A value cannot be replaced after a crash of its writer")
            again.delete(_KEYS)

    def _writer(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _WRITER, *sys.path]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert writer.stdin is not None
        writer.stdin.write(
            msgspec.msgpack.encode([self.use, dict(self._tier_options), _KEYS, _LENGTHS], enc_hook=plain)
        )
        writer.stdin.close()
        return writer

    def _must_be_whole(self, tier: WatchedTier) -> None:
        for key in _KEYS:
            received, found = tier.load(key, max(_LENGTHS.values()))
            if received is MISSING:
                continue
            assert isinstance(received, int), f"`get_into` returned {received} for a value of a killed writer"
            value = found[:received]
            whole = bool(value) and _LENGTHS.get(value[0]) == len(value) and value == value[:1] * len(value)
            assert whole, f"`get_into` returned a part or a mixture of values of a killed writer: {received} bytes"
        if "scan" in tier.capabilities():
            # What the writer had sent may arrive in between: then another listing is right.
            most, what = max(_LENGTHS.values()), "a listing of as many bytes as get_into returns"
            wait_until(lambda: all(tier.load(k, most)[0] == e.nbytes for k, e in tier.listed(_KEYS).items()), what)


DEADLINE_S = 0.3
TURNS = 4
# More than a pool has places.
FAILURES = 25
# More than twice the connections of a pool.
BREAKS = 24


def persist(call: Callable[[], T], patience_s: float) -> T:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except TierError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.005)


class WireFaultTests(TierKit):
    """Tests for tiers with a `faulty_tier` fixture: a call ends in time, and the tier recovers by itself."""

    @pytest.fixture
    def behind(self, faulty_tier: tuple[Tier, FaultProxy]) -> tuple[WatchedTier, FaultProxy]:
        return self.watch(faulty_tier[0]), faulty_tier[1]

    @pytest.mark.parametrize("kind", WIRE_FAULTS)
    def test_a_fault_on_the_wire_is_an_outcome_or_a_tier_error(
        self, behind: tuple[WatchedTier, FaultProxy], kind: str
    ) -> None:
        """A value is right or missing; afterwards it can be stored again. The core notices a flipped bit."""
        tier, proxy = behind
        chance = random.Random(23)  # noqa: S311  no secrets
        values = {key: key * (1 + 100 * index) for index, key in enumerate(self.fresh_keys(8))}
        (other,) = self.fresh_keys(1)
        tier.store_all(values)
        proxy.inject(kind)

        def get(keys: list[PackedKey], deadline: float) -> None:
            buffers = [bytearray(len(values[key])) for key in keys]
            outcomes = tier.get_into(keys, parts_of(buffers), deadline=deadline)
            for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
                if outcome == len(buffer) and kind != "flip":
                    must_be_equal(buffer, values[key], "`get_into` returned wrong bytes as a hit")

        for _ in range(1 if kind == "stall" else TURNS):
            batch = chance.sample(list(values), chance.randint(1, 5))
            self.in_time(partial(get, batch))
            self.in_time(partial(tier.put, batch, parts_of(values[key] for key in batch)))
            self.in_time(partial(tier.contains, [other]))
            self.in_time(partial(tier.delete, [other]))
        assert proxy.injected[kind], "The proxy injected no fault: connect the tier through the proxy"
        proxy.heal()
        for key, value in values.items():
            outcome, found = persist(partial(tier.load, key, len(value)), self.patience_s)
            assert outcome is MISSING or (outcome, found) == (len(value), value), "A fault left a wrong value"
        persist(partial(tier.store_all, values), self.patience_s)
        for key, value in values.items():
            self.must_be_there(tier, key, value)
        tier.ping()

    def test_what_a_stalled_wire_held_back_is_no_answer_to_the_next_call(
        self, behind: tuple[WatchedTier, FaultProxy]
    ) -> None:
        tier, proxy = behind
        one, two = self.fresh_keys(2)
        tier.store_all({one: b"one", two: b"two"})
        proxy.inject("stall")
        late = partial(tier.get_into, [one], parts_of([bytearray(3)]), deadline=time.monotonic() + 0.1)
        why = "no reply came before the deadline"
        self.in_threads(lambda: self.must_raise("get_into", late, why), within_s=self.patience_s)
        proxy.heal()
        for _ in range(10):
            self.must_be_there(tier, two, b"two")

    @pytest.mark.parametrize("name", ["contains", "get_into", "put", "delete"])
    def test_closing_ends_the_calls_that_wait_for_a_stalled_wire(
        self, behind: tuple[WatchedTier, FaultProxy], name: str
    ) -> None:
        tier, proxy = behind
        (key,) = self.fresh_keys(1)
        tier.store(key, b"value")
        proxy.inject("stall")
        far = time.monotonic() + 10 * self.patience_s
        ended = threading.Event()

        def wait() -> None:
            try:
                self.must_raise(name, lambda: self.call(tier, name, key, far), "the tier was closed during the call")
            finally:
                ended.set()

        def close() -> None:
            # Time to reach the wire; a call that comes later finds a closed tier.
            ended.wait(2 * DEADLINE_S)
            tier.close()
            in_time = ended.wait(self.grace_s)
            proxy.heal()
            assert in_time, (
                f"`{name}` still waits for the wire {self.grace_s:g} s after `close`, which must end calls in flight"
            )

        self.in_threads(wait, close, within_s=self.patience_s + self.grace_s)

    def test_failures_use_nothing_up(self, behind: tuple[WatchedTier, FaultProxy]) -> None:
        tier, proxy = behind
        (key,) = self.fresh_keys(1)
        tier.store(key, b"value")

        def fail(kind: str, times: int) -> int:
            proxy.inject(kind)
            for _ in range(times):
                with contextlib.suppress(TierError):
                    tier.get_into([key], parts_of([bytearray(5)]), deadline=time.monotonic() + DEADLINE_S)
            proxy.heal()
            self.must_be_there(tier, key, b"value")
            return len(os.listdir("/proc/self/fd"))

        one_by_one = [fail("reset", 1) for _ in range(BREAKS)]
        # A few more may be those of a pool that grows to its size.
        grown = one_by_one[-1] - min(one_by_one[:2])
        assert grown <= BREAKS // 2, f"The tier keeps {grown} descriptors of {BREAKS} broken connections"
        many = [fail(kind, FAILURES) for kind in ("reset", "refuse", "reset", "refuse")]
        grown = many[-1] - many[0]
        assert grown < FAILURES, f"The tier keeps {grown} descriptors after {3 * FAILURES} failures"

    def must_be_there(self, tier: WatchedTier, key: PackedKey, value: bytes) -> None:
        persist(lambda: tier.must_load(key, value, "the value stored before the fault"), self.patience_s)

    def in_time(self, call: Callable[..., object]) -> None:

        def ask() -> None:
            with contextlib.suppress(TierError):
                call(deadline=time.monotonic() + DEADLINE_S)

        self.in_threads(ask, within_s=DEADLINE_S + self.grace_s)
