"""The `Codec` contract: packing of an object's bytes on the way to an L2 tier, and unpacking on the way back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvframework.api.plugin import O, Provider, hookimpl

__all__ = ["Codec", "CodecProvider", "hookimpl"]

MAX_CODEC_NAME = 16
# The name under which a tier stores bytes as they are.
NO_CODEC = "none"


class Codec(ABC):
    """A packing of object bytes. Stateless; called from several storage threads at once. Blocking, CPU only."""

    name: str
    """At most `MAX_CODEC_NAME` ASCII characters, the name of its provider: each value in L2 carries it."""

    @abstractmethod
    def encode(self, data: memoryview) -> Sequence[memoryview]:
        """Return the packed form of `data` (1-D bytes) as parts, also 1-D bytes, that no later call changes. The parts
        may borrow `data`, which stays valid and unchanged until the tier's `put` has returned."""

    def encode_elements(self, data: memoryview, dtype: str) -> Sequence[memoryview]:
        """As `encode`, of elements of `dtype` (torch's name without the `torch.` prefix); "" where the server does not
        know them: an engine's own packing, or no object. What a layout declares is a claim: `data` may hold anything,
        and its length need not be whole elements. A server calls this; by default it is `encode(data)`."""
        return self.encode(data)

    @abstractmethod
    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        """Fill `out` exactly. Raises `ValueError` if `packed` is damaged or has another length. Allocates no more than
        a few times the size of `out` and `packed`, whatever `packed` claims. Keeps no reference to either."""


@dataclass(frozen=True, kw_only=True)
class CodecProvider(Provider[O]):
    """A codec. `create` makes the codec that all tiers of one server share."""

    kind = "codec"
    create: Callable[[O], Codec]
