"""Tests of batches: one outcome per key, in order; a failure of one key does not affect the others."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

from kvf_dev.testing.tier.kit import DAMAGED, DELETED, FAILED, FOUND, MISSING, STORED, TierKit
from kvframework.api.tier import Tier
from kvframework.errors import TierError

# More than a LOOKUP has, and than a statement of a database takes.
MANY = 33_000

# Bytes: the limit of a file, and a value beyond it.
_LIMIT, _TOO_LARGE = 8 << 20, 9 << 20


@contextlib.contextmanager
def _files_of_at_most(nbytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes. Python ignores SIGXFSZ, so that a write beyond it fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class BatchTests(TierKit):
    """Batches of distinct keys, and batches that name a key twice, which are applied in order."""

    def test_an_empty_batch_has_no_outcomes(self, watched: Tier) -> None:
        assert watched.contains([], deadline=self.soon()) == []
        assert watched.put([], [], deadline=self.soon()) == []
        assert watched.get_into([], [], deadline=self.soon()) == []
        assert watched.delete([], deadline=self.soon()) == []

    def test_a_value_that_the_machine_refuses_fails_alone(self, watched: Tier) -> None:
        """A file beyond the process's limit of its size (EFBIG), like one beyond a quota, is that value's failure."""
        keys, values = self.fresh_keys(3), [b"before", bytes(_TOO_LARGE), b"behind"]
        with _files_of_at_most(_LIMIT):
            try:
                outcomes = watched.put(keys, self.parts_of(values), deadline=self.soon())
            except TierError as error:
                pytest.fail(f"a value beyond the limit of a file's size failed its whole batch: {error}")
        assert outcomes[::2] == [STORED, STORED], "a value beyond the limit of a file's size spoils others"
        assert outcomes[1] in (STORED, FAILED), f"a value that cannot be written is FAILED, not {outcomes[1]!r}"
        for key, value in zip(keys[::2], values[::2], strict=True):
            self.must_load(watched, key, value, "in a batch with one that could not be written")
        if outcomes[1] is FAILED:
            assert watched.contains(keys[1:2], deadline=self.soon()) == [MISSING], "a value that is FAILED is there"

    def test_as_many_keys_as_a_request_has_are_looked_up_at_once(self, watched: Tier) -> None:
        keys = self.fresh_keys(MANY)
        known = [keys[0], keys[MANY // 2], keys[-1]]
        assert watched.put(tuple(known), self.parts_of([b"value"] * 3), deadline=self.soon()) == [STORED] * 3
        found = watched.contains(tuple(keys), deadline=self.soon())
        wrong = [index for index, key in enumerate(keys) if found[index] is not (FOUND if key in known else MISSING)]
        assert not wrong, f"{len(wrong)} of {MANY} keys, the first at {wrong[0]}: {found[wrong[0]]}"

    @pytest.mark.parametrize("count", [2, 700])
    def test_outcomes_keep_the_order_of_a_mixed_batch(self, watched: Tier, count: int) -> None:
        keys = self.fresh_keys(count)
        values = {key: b"%d of %d" % (index, count) for index, key in enumerate(keys) if index % 3 != 1}
        outcomes = watched.put(list(values), self.parts_of(list(values.values())), deadline=self.soon())
        assert outcomes == [STORED] * len(values)
        expected = [FOUND if key in values else MISSING for key in keys]
        assert watched.contains(keys, deadline=self.soon()) == expected
        buffers = [bytearray(len(values.get(key, b"none"))) for key in keys]
        received = [len(values[key]) if key in values else MISSING for key in keys]
        assert watched.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == received
        for key, buffer in zip(keys, buffers, strict=True):
            self.must_be([buffer], [values.get(key, buffer)])
        expected = [DELETED if key in values else MISSING for key in keys]
        assert watched.delete(keys, deadline=self.soon()) == expected

    def test_a_batch_of_large_values(self, watched: Tier) -> None:
        keys = self.fresh_keys(10)
        values = [os.urandom(1000) * 3000 for _ in keys]
        assert watched.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)
        buffers = [bytearray(len(value)) for value in values]
        assert watched.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == [len(each) for each in values]
        self.must_be(buffers, values)
        assert watched.delete(keys, deadline=self.soon()) == [DELETED] * len(keys)

    def test_large_and_tiny_values_travel_together(self, watched: Tier) -> None:
        keys = self.fresh_keys(9)
        values = [os.urandom([0, 1, 2 << 20][index % 3]) for index in range(len(keys))]
        assert watched.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)
        buffers = [bytearray(len(value)) for value in values]
        assert watched.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == [len(each) for each in values]
        self.must_be(buffers, values)

    @pytest.mark.parametrize("nbytes", [101, 50_000, 3 << 20])
    def test_a_longer_value_disturbs_no_other_of_its_batch(self, watched: Tier, nbytes: int) -> None:
        before, wrong, missing, after = keys = self.fresh_keys(4)
        self.store(watched, before, b"b" * 100)
        self.store(watched, wrong, b"w" * nbytes)
        self.store(watched, after, b"a" * 100)
        buffers = [bytearray(100) for _ in keys]
        outcomes = watched.get_into(keys, self.parts_of(buffers), deadline=self.soon())
        assert outcomes == [100, DAMAGED, MISSING, 100]
        self.must_be([buffers[0], buffers[3]], [b"b" * 100, b"a" * 100], "beside a longer value others are wrong")
        assert watched.contains([missing, wrong], deadline=self.soon()) == [MISSING, FOUND]

    def test_the_same_key_twice_is_applied_in_order(self, watched: Tier) -> None:
        one, other = self.fresh_keys(2)
        parts = self.parts_of([b"first", b"other", b"second"])
        assert watched.put([one, other, one], parts, deadline=self.soon()) == [STORED] * 3
        buffers = [bytearray(6), bytearray(5), bytearray(6)]
        assert watched.get_into([one, other, one], self.parts_of(buffers), deadline=self.soon()) == [6, 5, 6]
        self.must_be(buffers, [b"second", b"other", b"second"], "of a key twice in a put the last value stays")
        assert watched.contains([one, one], deadline=self.soon()) == [FOUND, FOUND]
        watched.touch([one, one], deadline=self.soon())
        assert watched.delete([one, other, one], deadline=self.soon()) == [DELETED, DELETED, MISSING]
