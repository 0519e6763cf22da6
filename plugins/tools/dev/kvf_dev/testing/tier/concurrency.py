"""Tests of several threads on one tier, as the server's storage threads use it; of deadlines; and the comparison with a
dict: hypothesis generates sequences of batches, and shrinks one that differs."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvf_dev.testing.tier.kit import DAMAGED, DELETED, EVERY_CALL, FOUND, MISSING, STORED, TierKit
from kvframework.api.tier import Outcome, PackedKey, Tier
from kvframework.errors import TierError

# Rounds with values of these sizes: small ones, whose steps lie close together, often; large ones, which take long.
SIZES = [(150, 600), (12, 100_000)]
sized = pytest.mark.parametrize(("rounds", "size"), SIZES)

# As many threads as a busy server has for one tier: loads, writes, and those that clear.
THREADS = 12


# Seconds for which a tier that is quick goes on, so that threads meet in the middle of its calls.
LEAST_S = 0.7


def turns(least: int) -> Iterator[int]:
    """Return numbers: at least so many, and for at least `LEAST_S`."""
    end = time.monotonic() + LEAST_S
    for turn in itertools.count():
        if turn >= least and time.monotonic() >= end:
            return
        yield turn


class ConcurrencyTests(TierKit):
    """A reader sees the whole value of one writer, or none. Values of these tests contain no zero byte, so that a part
    of a buffer that was not written shows.
    """

    def while_writing(self, write: Callable[[], None], *reads: Callable[[], None]) -> None:
        """Repeat `reads`, each in its own thread, until `write` has ended, and once more."""
        done = threading.Event()

        def repeat(read: Callable[[], None]) -> None:
            while not done.is_set():
                read()
            read()

        def finish() -> None:
            try:
                write()
            finally:
                done.set()

        self.in_threads(finish, *(lambda read=read: repeat(read) for read in reads))

    def read(self, tier: Tier, key: bytes, room: int) -> bytes | None:
        """Return the value under `key`, None if it is missing."""
        received, found = self.load(tier, key, room)
        if received is MISSING:
            return None
        assert not isinstance(received, Outcome), f"{received} of a key that is stored and deleted meanwhile"
        assert 0 not in found[:received], f"of {received} bytes that were received some are of no value"
        return found[:received]

    def test_threads_with_keys_of_their_own_do_not_mix_values(self, watched: Tier) -> None:
        def work(seed: int) -> None:
            keys = self.fresh_keys(4)
            for turn in range(10):
                values = [bytes([seed, turn + 1, index + 1]) * (1 + 4001 * index) for index in range(len(keys))]
                assert watched.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)
                buffers = [bytearray(len(value)) for value in values]
                received = watched.get_into(keys, self.parts_of(buffers), deadline=self.soon())
                assert received == [len(value) for value in values], "another length than this thread stored"
                self.must_be(buffers, values, "another value than this thread stored")
                assert watched.contains(keys, deadline=self.soon()) == [FOUND] * len(keys)
            assert watched.delete(keys, deadline=self.soon()) == [DELETED] * len(keys)

        self.in_threads(*(lambda seed=seed: work(seed + 1) for seed in range(THREADS)))

    @sized
    def test_readers_see_the_value_of_one_writer(self, watched: Tier, rounds: int, size: int) -> None:
        keys = self.fresh_keys(2)
        # Values of each writer have a length of their own, too.
        lengths = {9: size, 1: size, 2: size + size // 3, 3: size // 2}
        for key in keys:
            self.store(watched, key, b"\x09" * size)

        def write(byte: int) -> None:
            for _ in turns(rounds):
                values = [bytes([byte]) * lengths[byte] for _ in keys]
                assert watched.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)

        def write_all() -> None:
            self.in_threads(*(lambda byte=byte: write(byte) for byte in (1, 2, 3)))

        def read() -> None:
            for key in keys:
                value = self.read(watched, key, 2 * size)
                assert value is not None, "a value that is replaced is missing meanwhile"
                assert len(set(value)) == 1, "bytes of several values in one"
                assert len(value) == lengths.get(value[0]), "the bytes of one value, and the length of another"

        self.while_writing(write_all, read, read)

    @sized
    def test_a_new_value_is_seen_whole_or_not_at_all(self, watched: Tier, rounds: int, size: int) -> None:
        value = b"\x05" * size
        at = self.fresh_keys(1)  # the key that is being written

        def write() -> None:
            for _ in turns(rounds):
                (key,) = at[:] = self.fresh_keys(1)
                self.store(watched, key, value)
                assert watched.contains([key], deadline=self.soon()) == [FOUND]

        def read() -> None:
            key = at[0]
            (found,) = watched.contains([key], deadline=self.soon())
            seen = self.read(watched, key, size)
            assert seen in (value, None), "a part of a value was visible"
            assert found is MISSING or seen is not None, "a value was found before it could be read"

        self.while_writing(write, read, read)

    @sized
    def test_readers_of_what_is_deleted_see_it_whole_or_missing(self, watched: Tier, rounds: int, size: int) -> None:
        keys, value = self.fresh_keys(3), b"\x07" * size

        def write() -> None:
            for _ in turns(rounds):
                assert watched.put(keys, self.parts_of([value] * 3), deadline=self.soon()) == [STORED] * 3
                assert watched.delete(keys, deadline=self.soon()) == [DELETED] * 3

        def read() -> None:
            for key in keys:
                assert self.read(watched, key, size) in (value, None), "a part of a value was visible"

        self.while_writing(write, read, read)

    def test_one_value_is_deleted_once(self, watched: Tier) -> None:
        keys = self.fresh_keys(60)
        assert watched.put(keys, self.parts_of([b"value"] * 60), deadline=self.soon()) == [STORED] * 60
        outcomes: list[object] = []
        at_once = threading.Barrier(3, timeout=self.patience_s)

        def delete() -> None:
            for key in keys:
                at_once.wait()
                outcomes.extend(watched.delete([key], deadline=self.soon()))

        self.in_threads(delete, delete, delete)
        told = {outcome: outcomes.count(outcome) for outcome in (DELETED, MISSING)}
        assert told == {DELETED: 60, MISSING: 120}, "of three threads that delete a value one deletes it"

    def test_touching_undoes_no_other_call(self, watched: Tier) -> None:
        """A touch that writes a value back revives what was deleted, or undoes what was stored meanwhile."""
        if "touch" not in watched.capabilities():
            pytest.skip("the tier has no touch")
        stored, deleted = self.fresh_keys(2)
        self.store(watched, stored, b"first")

        def write() -> None:
            for turn in turns(150):
                value = b"turn %d" % turn
                self.store(watched, stored, value)
                self.must_load(watched, stored, value, "a touch undid a put")
                self.store(watched, deleted, value)
                assert watched.delete([deleted], deadline=self.soon()) == [DELETED]
                assert watched.contains([deleted], deadline=self.soon()) == [MISSING], "a touch undid a delete"

        def touch() -> None:
            watched.touch([stored, deleted], deadline=self.soon())

        self.while_writing(write, touch, touch)

    def test_every_value_of_concurrent_writers_is_kept(self, watched: Tier) -> None:
        def work(seed: int, kept: list[tuple[bytes, bytes]]) -> None:
            for turn in turns(100):
                (key,) = self.fresh_keys(1)
                self.store(watched, key, b"%d.%d" % (seed, turn))
                kept.append((key, b"%d.%d" % (seed, turn)))

        kept: list[tuple[bytes, bytes]] = []
        self.in_threads(*(lambda seed=seed: work(seed, kept) for seed in range(6)))
        for key, value in kept:
            self.must_load(watched, key, value, "a value that was stored beside others is lost")


_T = TypeVar("_T")

SHORT_S = 0.05


class Held(list[_T]):
    """A list whose iteration pauses before the second item until `go` is set, for at most `within_s` seconds."""

    def __init__(self, items: Sequence[_T], within_s: float) -> None:
        super().__init__(items)
        self.reached, self.go = threading.Event(), threading.Event()
        self._within_s = within_s

    def __iter__(self) -> Iterator[_T]:
        for index in range(len(self)):
            if index == 1:
                self.reached.set()
                self.go.wait(self._within_s)
            yield self[index]


class DeadlineTests(TierKit):
    """An operation that exceeds its deadline raises `TierError`; the tier stays usable."""

    @pytest.mark.parametrize("name", EVERY_CALL)
    def test_a_passed_deadline_fails_at_once(self, watched: Tier, name: str) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        past = time.monotonic() - 1.0
        self.must_raise(name, self.every_call(watched, key, lambda: past)[name], "the deadline has passed")
        # In another thread: what the late call may have left locked is not this thread's there.
        self.in_threads(lambda: self.must_load(watched, key, b"value", "the late call changed it"))
        self.in_threads(lambda: self.store(watched, key, b"again"))
        self.must_load(watched, key, b"again")

    @pytest.mark.parametrize("seconds", [0.001, 0.05])
    @pytest.mark.parametrize("name", ["put", "get_into", "contains", "delete"])
    def test_a_short_deadline_ends_a_big_batch(self, watched: Tier, name: str, seconds: float) -> None:
        """The deadline is that of the batch, not of each key."""
        value = os.urandom(32 << 10)
        keys = self.fresh_keys(1000)
        parts = [[memoryview(value if name == "put" else bytearray(value))]] * len(keys)
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TierError):
            if name in ("put", "get_into"):
                getattr(watched, name)(keys, parts, deadline=deadline)
            else:
                getattr(watched, name)(keys, deadline=deadline)
        late = time.monotonic() - deadline
        assert late < self.grace_s, f"{name} went on for {late:.1f} s after its deadline"

        some = keys[:: len(keys) // 20]
        buffers = [bytearray(len(value)) for _ in some]
        outcomes = watched.get_into(some, self.parts_of(buffers), deadline=self.soon())
        assert set(outcomes) <= {len(value), MISSING}, "a value of a batch that ended early is there in part"
        for buffer, outcome in zip(buffers, outcomes, strict=True):
            if outcome is not MISSING:
                self.must_be([buffer], [value], "a value of a batch that ended early is there in part")
        assert set(watched.delete(keys, deadline=self.soon())) <= {DELETED, MISSING}

    def test_a_put_waits_for_no_other_beyond_its_deadline(self, watched: Tier) -> None:
        keys = self.fresh_keys(2)
        (other,) = self.fresh_keys(1)
        parts = self.parts_of([b"value", b"value"])
        held = Held(parts, SHORT_S + self.grace_s + 0.5)

        def put_much() -> None:
            try:
                watched.put(keys, held, deadline=self.soon())
            finally:
                held.reached.set()  # for a tier that does not iterate over the list

        def put_meanwhile() -> None:
            held.reached.wait(self.patience_s)
            started = time.monotonic()
            try:
                with contextlib.suppress(TierError):
                    watched.put([other], parts[:1], deadline=started + SHORT_S)
                took = time.monotonic() - started
            finally:
                held.go.set()
            assert took < SHORT_S + self.grace_s, "put waited for another put beyond its deadline"

        self.in_threads(put_much, put_meanwhile)
        self.must_load(watched, keys[1], b"value")
        assert set(watched.delete([*keys, other], deadline=self.soon())) <= {DELETED, MISSING}

    def test_a_late_call_does_not_disturb_the_next(self, watched: Tier) -> None:
        keys = self.fresh_keys(50)
        values = [b"%03d" % index * 3000 for index in range(len(keys))]
        watched.put(keys, self.parts_of(values), deadline=self.soon())
        other = [b"%03d" % index * 3000 for index in range(len(keys))]
        for step in range(20):
            buffers = [bytearray(len(value)) for value in values]
            with contextlib.suppress(TierError):
                watched.get_into(keys, self.parts_of(buffers), deadline=time.monotonic() + max(step - 12, 0) / 5000)
            self.must_load(watched, keys[step], values[step], "the answer of a late call, or none")
            with contextlib.suppress(TierError):
                watched.put(keys, self.parts_of(other), deadline=time.monotonic() + max(step - 12, 0) / 5000)
            self.in_threads(lambda step=step: self.store(watched, keys[step], values[step]))  # type: ignore[misc]
            self.must_load(watched, keys[step], values[step], "a late put went on after it had ended")


STEPS = 15

# Few keys, so that batches share them; a few lengths, so that buffers are too small, too large and exact.
KEYS = st.integers(0, 5)
LENGTHS = st.sampled_from([0, 1, 2, 3, 17, 4096, 70_000])
KEY_BATCHES = st.lists(KEYS, max_size=8)
SIZED_BATCHES = st.lists(st.tuples(KEYS, LENGTHS), max_size=8)


class ModelTests(TierKit):
    def test_it_behaves_like_a_dict(self, watched: Tier) -> None:
        class Machine(TierMachine):
            kit, tier_under_test = self, watched

        # Some releases of hypothesis have no types for it.
        run_state_machine_as_test(  # type: ignore[no-untyped-call, unused-ignore]
            Machine,
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=STEPS,
                deadline=None,
                phases=(Phase.reuse, Phase.generate, Phase.shrink),
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )


class TierMachine(RuleBasedStateMachine):
    """One sequence of batches, on its own keys."""

    kit: ClassVar[TierKit]
    tier_under_test: ClassVar[Tier]

    def __init__(self) -> None:
        super().__init__()
        self._kit = self.kit
        self._tier = self.tier_under_test
        self._keys = self._kit.fresh_keys(6)
        self._model: dict[PackedKey, bytes] = {}
        self._stored = 0

    @rule(batch=SIZED_BATCHES)
    def put(self, batch: list[tuple[int, int]]) -> None:
        keys, values = [], []
        for index, nbytes in batch:
            self._stored += 1
            keys.append(self._keys[index])
            values.append((b"%d." % self._stored * nbytes)[:nbytes])
        assert self._tier.put(keys, self._kit.parts_of(values), deadline=self._kit.soon()) == [STORED] * len(batch)
        self._model.update(zip(keys, values, strict=True))

    @rule(batch=SIZED_BATCHES)
    def get(self, batch: list[tuple[int, int]]) -> None:
        keys, buffers = [self._keys[index] for index, _ in batch], [bytearray(b"\xa5" * nbytes) for _, nbytes in batch]
        outcomes = self._tier.get_into(keys, self._kit.parts_of(buffers), deadline=self._kit.soon())
        assert outcomes == [self._expected(key, len(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
            if not isinstance(outcome, Outcome):
                value = self._model[key]
                self._kit.must_be([buffer[: len(value)]], [value])

    @rule(batch=KEY_BATCHES)
    def delete(self, batch: list[int]) -> None:
        keys = [self._keys[index] for index in batch]
        expected = [MISSING if self._model.pop(key, None) is None else DELETED for key in keys]
        assert self._tier.delete(keys, deadline=self._kit.soon()) == expected

    @rule(batch=KEY_BATCHES)
    def contains(self, batch: list[int]) -> None:
        keys = [self._keys[index] for index in batch]
        assert self._tier.contains(keys, deadline=self._kit.soon()) == self._known(keys)

    @rule(batch=KEY_BATCHES)
    def touch(self, batch: list[int]) -> None:
        self._tier.touch([self._keys[index] for index in batch], deadline=self._kit.soon())
        assert self._tier.contains(self._keys, deadline=self._kit.soon()) == self._known(self._keys)

    def teardown(self) -> None:
        self._tier.delete(self._keys, deadline=self._kit.soon())

    def _known(self, keys: Sequence[PackedKey]) -> list[Outcome]:
        return [FOUND if key in self._model else MISSING for key in keys]

    def _expected(self, key: PackedKey, nbytes: int) -> int | Outcome:
        if key not in self._model:
            return MISSING
        return DAMAGED if len(self._model[key]) > nbytes else len(self._model[key])
