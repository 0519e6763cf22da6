"""All chance of one action, from one number: an action does the same whatever was done before it, so that a script
can be shortened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    __slots__ = ("_state",)

    def __init__(self, bits: int) -> None:
        self._state = bits

    def pick(self, sides: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return (self._state >> 33) % sides

    def chance(self, percent: int) -> bool:
        return self.pick(100) < percent

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.pick(len(choices))]
