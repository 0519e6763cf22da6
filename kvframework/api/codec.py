"""Owns the `Codec` contract: how an object's bytes are packed on their way to an L2 tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

MAX_CODEC_NAME = 16
# How a tier says that it stores bytes as they are.
NO_CODEC = "none"


class Codec(ABC):
    """Packs and unpacks object bytes. Called from storage threads, several at once; stateless. Blocking, CPU only."""

    name: str
    """At most `MAX_CODEC_NAME` ASCII characters, the name of its provider: each value in L2 carries it."""

    @abstractmethod
    def encode(self, data: memoryview) -> Sequence[memoryview]:
        """The packed form of `data` (1-D bytes): parts that are 1-D bytes too, and stay as they are while others are
        encoded. May borrow `data`, which stays valid and unchanged until the tier's `put` has returned."""

    @abstractmethod
    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        """Unpacks into `out`, filling it exactly. Raises `ValueError` if `packed` is damaged or has another length.

        Whatever `packed` says, allocates no more than some times `out` and `packed`. Keeps no reference to either.
        """
