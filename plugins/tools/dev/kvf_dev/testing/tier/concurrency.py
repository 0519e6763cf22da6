"""Tests of several threads, and several nodes, on one store, and of deadlines."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from kvf_dev.testing.kit import must_be_equal
from kvf_dev.testing.tier.kit import DAMAGED, DELETED, EVERY_CALL, FOUND, MISSING, TierKit, WatchedTier, parts_of
from kvframework.api.tier import PackedKey
from kvframework.errors import TierError

# Rounds with values of these sizes: small ones, whose steps lie close together, often; large ones, which take long.
sized = pytest.mark.parametrize(("rounds", "size"), [(150, 600), (12, 100_000)])

# As many threads as a busy server has for one tier: loads, writes, and those that clear.
THREADS = 12

# Seconds for which a tier that is quick goes on, so that threads meet in the middle of its calls.
LEAST_S = 0.7
SHORT_S = 0.05


def turns(least: int) -> Iterator[int]:
    end = time.monotonic() + LEAST_S
    for turn in itertools.count():
        if turn >= least and time.monotonic() >= end:
            return
        yield turn


class ConcurrencyTests(TierKit):
    """A reader sees the whole value of one writer, or none."""

    def while_writing(self, writes: list[Callable[[], object]], *reads: Callable[[], object]) -> None:
        done = threading.Event()

        def repeat(read: Callable[[], object]) -> None:
            while not done.is_set():
                read()
            read()

        def finish() -> None:
            try:
                self.in_threads(*writes)
            finally:
                done.set()

        self.in_threads(finish, *(partial(repeat, read) for read in reads))

    def must_see_whole_values(self, one: WatchedTier, two: WatchedTier, rounds: int, size: int) -> None:
        """Write, delete and read the same keys by both tiers. A value repeats a byte that says its length, and no value
        has a zero byte, so that a part of a buffer that was not written shows."""
        lengths = {9: size, 1: size, 2: size, 3: size + size // 3, 4: size // 2, 5: size}
        replaced, deleted = self.fresh_keys(2)
        new = self.fresh_keys(1)  # the key that is being written
        one.store(replaced, b"\x09" * size)

        def write(tier: WatchedTier, byte: int) -> None:
            for turn in turns(rounds):
                value = bytes([byte]) * lengths[byte]
                tier.store_all({replaced: value, deleted: value})
                if turn % 2:
                    tier.delete([deleted])

        def write_new() -> None:
            for _ in turns(rounds):
                (key,) = new[:] = self.fresh_keys(1)
                one.store(key, b"\x05" * size)
                assert one.contains([key]) == [FOUND]

        def read(tier: WatchedTier) -> None:
            for key in (replaced, deleted, new[0]):
                (found,) = tier.contains([key])
                seen = self.whole(tier, key, lengths)
                assert seen or key != replaced, "A value is missing while another thread replaces it"
                assert seen or key == deleted or found is MISSING, "`contains` found a value that could not be read yet"

        writes = [partial(write, two if byte % 2 else one, byte) for byte in (1, 2, 3, 4)]
        self.while_writing([write_new, *writes], partial(read, one), partial(read, two))

    def whole(self, tier: WatchedTier, key: PackedKey, lengths: dict[int, int]) -> bool:
        received, found = tier.load(key, 2 * max(lengths.values()))
        if received is MISSING:
            return False
        assert isinstance(received, int), f"`get_into` returned {received} during a store or delete"
        value = found[:received]
        assert len(set(value)) == 1, "`get_into` mixed the bytes of several values"
        assert lengths.get(value[0]) == len(value), "`get_into` returned a wrong length of a value"
        return True

    @sized
    def test_readers_see_the_whole_value_of_one_writer(self, watched: WatchedTier, rounds: int, size: int) -> None:
        self.must_see_whole_values(watched, watched, rounds, size)

    def test_threads_with_keys_of_their_own_do_not_mix_values(self, watched: WatchedTier) -> None:
        kept: dict[PackedKey, bytes] = {}

        def work(seed: int) -> None:
            for turn in turns(10):
                keys = self.fresh_keys(4)
                values = [b"%d.%d.%d." % (seed, turn, index) * (1 + 700 * index) for index in range(len(keys))]
                watched.store_all(dict(zip(keys, values, strict=True)))
                buffers = [bytearray(len(value)) for value in values]
                assert watched.get_into(keys, parts_of(buffers)) == [len(value) for value in values]
                for buffer, value in zip(buffers, values, strict=True):
                    must_be_equal(buffer, value, "`get_into` returned another value than this thread stored")
                assert watched.contains(keys) == [FOUND] * len(keys)
                assert watched.delete(keys[1:]) == [DELETED] * (len(keys) - 1)
                kept[keys[0]] = values[0]

        self.in_threads(*(partial(work, seed) for seed in range(THREADS)))
        for key, value in kept.items():
            watched.must_load(key, value, "The tier lost a value that was stored beside others")

    def test_one_value_is_deleted_once(self, watched: WatchedTier) -> None:
        keys = self.fresh_keys(60)
        watched.store_all(dict.fromkeys(keys, b"value"))
        outcomes: list[object] = []
        at_once = threading.Barrier(3, timeout=self.patience_s)

        def delete() -> None:
            for key in keys:
                at_once.wait()
                outcomes.extend(watched.delete([key]))

        self.in_threads(delete, delete, delete)
        told = {outcome: outcomes.count(outcome) for outcome in (DELETED, MISSING)}
        assert told == {DELETED: 60, MISSING: 120}, "When three threads delete a value, exactly one must get DELETED"

    def test_touching_undoes_no_other_call(self, watched: WatchedTier) -> None:
        """A touch that writes a value back revives what was deleted, or undoes what was stored meanwhile."""
        self.needs(watched, "touch")
        stored, deleted = self.fresh_keys(2)
        watched.store(stored, b"first")

        def write() -> None:
            for turn in turns(150):
                value = b"turn %d" % turn
                watched.store(stored, value)
                watched.must_load(stored, value, "`touch` undid a put of another thread")
                watched.store(deleted, value)
                assert watched.delete([deleted]) == [DELETED]
                assert watched.contains([deleted]) == [MISSING], "`touch` undid a delete of another thread"

        touch = partial(watched.touch, [stored, deleted])
        self.while_writing([write], touch, touch)


class SharingTests(ConcurrencyTests):
    """For tiers that are `shared`."""

    @pytest.fixture
    def other(self, watched: WatchedTier) -> WatchedTier:
        if not self.is_shared:
            pytest.skip("The tier is not shared")
        if not self.can_reopen:
            pytest.fail("The tier is shared: define `reopen(tier)`, a second tier over the same store")
        return self.another(watched)

    def test_each_sees_what_the_other_does(self, watched: WatchedTier, other: WatchedTier) -> None:
        one, two = self.fresh_keys(2)
        value = os.urandom(70_000)
        watched.store(one, value)
        other.store(two, b"of the other")
        assert other.contains([one, two]) == [FOUND, FOUND]
        other.must_load(one, value)
        watched.must_load(two, b"of the other")
        other.store(one, b"replaced")
        watched.must_load(one, b"replaced")
        other.store(one, b"replaced by more")
        watched.must_answer(one, 8, DAMAGED)
        watched.must_load(one, b"replaced by more")
        assert other.delete([two]) == [DELETED]
        assert watched.contains([two]) == [MISSING]
        watched.must_answer(two, 5, MISSING)
        assert watched.delete([two]) == [MISSING]
        watched.close()
        other.must_load(one, b"replaced by more", "After the other tier was closed")
        other.store(one, b"again")

    @sized
    def test_two_at_work_on_the_same_keys_see_whole_values(
        self, watched: WatchedTier, other: WatchedTier, rounds: int, size: int
    ) -> None:
        self.must_see_whole_values(watched, other, rounds, size)


class Held(list[list[memoryview]]):
    """Values whose iteration pauses before the second one until `go` is set, for at most `within_s` seconds."""

    def __init__(self, values: Sequence[bytes | bytearray], within_s: float) -> None:
        super().__init__(parts_of(values))
        self.reached, self.go = threading.Event(), threading.Event()
        self._within_s = within_s

    def __iter__(self) -> Iterator[list[memoryview]]:
        for index in range(len(self)):
            if index == 1:
                self.reached.set()
                self.go.wait(self._within_s)
            yield self[index]


class DeadlineTests(TierKit):
    """An operation that exceeds its deadline raises `TierError`; the tier stays usable."""

    @pytest.mark.parametrize("name", EVERY_CALL)
    def test_a_passed_deadline_fails_at_once(self, watched: WatchedTier, name: str) -> None:
        (key,) = self.fresh_keys(1)
        watched.store(key, b"value")
        past = time.monotonic() - 1.0
        self.must_raise(name, lambda: self.call(watched, name, key, past), "the call's deadline has passed")
        # In another thread: what the late call may have left locked is not this thread's there.
        self.in_threads(lambda: watched.must_load(key, b"value", "A call after its deadline changed the value"))
        self.in_threads(lambda: watched.store(key, b"again"))
        watched.must_load(key, b"again")

    @pytest.mark.parametrize("seconds", [0.001, 0.05])
    @pytest.mark.parametrize("name", ["put", "get_into", "contains", "delete"])
    def test_a_short_deadline_ends_a_big_batch(self, watched: WatchedTier, name: str, seconds: float) -> None:
        value = os.urandom(32 << 10)
        keys = self.fresh_keys(1000)
        parts = [[memoryview(value if name == "put" else bytearray(value))]] * len(keys)
        arguments = [keys, parts] if name in ("put", "get_into") else [keys]
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TierError):
            getattr(watched, name)(*arguments, deadline=deadline)
        for key in keys[:: len(keys) // 20]:
            received, found = watched.load(key, len(value))
            whole = received is MISSING or (received, found) == (len(value), value)
            assert whole, "The tier holds a part of a value of a put that ended early"
        assert set(watched.delete(keys)) <= {DELETED, MISSING}

    @pytest.mark.parametrize("opener", ["first", "second"])
    @pytest.mark.parametrize("name", ["put", "get_into", "contains", "delete", "touch"])
    def test_no_call_waits_for_a_put_beyond_its_deadline(self, watched: WatchedTier, name: str, opener: str) -> None:
        """Neither for a lock of the tier, nor for one of the store that a tier of another process may hold."""
        tier = watched if opener == "first" else self.second(watched)
        if tier is None:
            pytest.skip("The store refuses a second opener")
        self.needs(tier, name)
        *keys, other = self.fresh_keys(3)
        held = Held([b"value", b"value"], SHORT_S + self.grace_s + 0.5)

        def put_much() -> None:
            try:
                watched.put(keys, held)
            finally:
                held.reached.set()  # for a tier that does not iterate over the list

        def call_meanwhile() -> None:
            held.reached.wait(self.patience_s)
            try:
                with contextlib.suppress(TierError):
                    self.call(tier, name, other, time.monotonic() + SHORT_S)
            finally:
                held.go.set()

        self.in_threads(put_much, call_meanwhile)
        watched.must_load(keys[1], b"value")
        assert set(watched.delete([*keys, other])) <= {DELETED, MISSING}

    def test_a_late_call_does_not_disturb_the_next(self, watched: WatchedTier) -> None:
        keys = self.fresh_keys(50)
        values = [b"%03d" % index * 3000 for index in range(len(keys))]
        watched.put(keys, parts_of(values))
        for step in range(20):
            for call in (watched.get_into, watched.put):
                # A late put may still arrive, so it stores the same.
                buffers = parts_of(bytearray(value) for value in values)
                with contextlib.suppress(TierError):
                    call(keys, buffers, deadline=time.monotonic() + max(step - 12, 0) / 5000)
                watched.must_load(keys[step], values[step], "`get_into` returned a late call's reply")
            self.in_threads(lambda step=step: watched.store(keys[step], values[step]))  # type: ignore[misc]
