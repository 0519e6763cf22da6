"""Packed token ids: the token kernel gives the integers and the errors of `array.fromlist`."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.client import hashing
from kvframework.client.hashing import packed_behind

KERNEL = hashing._kernel()
kernel = pytest.mark.skipif(KERNEL is None, reason="the token kernel was not built, or not for this interpreter")

MANY = 2 * hashing._FEW
# Long enough for the kernel, around what is special: small integers that Python keeps, and the first of two digits.
IDS = st.sampled_from([0, 1, 256, 257, 128_000, (1 << 30) - 1, 1 << 30, (1 << 32) - 1]) | st.integers(0, (1 << 32) - 1)


class Token(IntEnum):
    FIRST = 7


class Indexed:
    def __index__(self) -> int:
        return 7


def by_array(rest: array.array[int], ids: Sequence[int]) -> array.array[int]:
    return rest + array.array("I", ids)


@given(st.lists(st.integers(0, 99), max_size=3), st.lists(IDS, max_size=20), st.booleans())
def test_ids_of_any_size(rest: list[int], ids: list[int], many: bool) -> None:
    before = array.array("I", rest)
    ids = ids * (MANY if many else 1)
    assert packed_behind(before, ids) == by_array(before, ids)
    assert before.tolist() == rest


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1 << 64, -(1 << 90), 1.0, "7", None, Indexed()])
@pytest.mark.parametrize("at", [0, MANY // 2, MANY - 1])
def test_what_is_no_token_has_the_errors_of_an_array(wrong: object, at: int) -> None:
    ids: list[object] = [128_000] * MANY
    ids[at] = wrong
    found, expected = outcome(packed_behind, ids), outcome(by_array, ids)
    assert found == expected
    assert (found[0] is array.array) is isinstance(wrong, Indexed)


def outcome(pack: object, ids: list[object]) -> tuple[type, str]:
    try:
        packed = pack(array.array("I"), ids)  # type: ignore[operator]
    except (OverflowError, TypeError) as error:
        return type(error), str(error)
    return type(packed), packed.tolist()


@pytest.mark.parametrize("odd", [True, False, Token.FIRST])
def test_subclasses_of_integers_are_tokens(odd: int) -> None:
    ids = [*range(MANY), odd]
    assert packed_behind(array.array("I"), ids).tolist() == [*range(MANY), int(odd)]


def test_a_subclass_of_list_is_packed() -> None:
    class Tokens(list[int]):
        pass

    assert packed_behind(array.array("I"), Tokens(range(MANY))).tolist() == list(range(MANY))


@kernel
def test_the_kernel_packs_plain_integers_up_to_the_first_that_is_none() -> None:
    assert KERNEL is not None
    room = array.array("I", [9]) * 4
    assert KERNEL([0, 5, (1 << 30) - 1, 1000, 6], room) == 4
    assert room.tolist() == [0, 5, (1 << 30) - 1, 1000]
    for odd in (-1, 1 << 30, True):
        assert KERNEL([3, odd, 3], room) == 1


def test_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_kernel", lambda: None)
    assert packed_behind(array.array("I", [1]), list(range(MANY))).tolist() == [1, *range(MANY)]


def test_an_interpreter_that_is_not_known_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    assert hashing._kernel.__wrapped__() is None
