"""The `Codec` contract: packing of an object's bytes on the way to an L2 tier, and unpacking on the way back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvframework.api.keys import PackedKey
from kvframework.api.plugin import O, Provider, hookimpl

__all__ = ["MAX_OVERHEAD", "Codec", "CodecProvider", "ValueName", "ValueRefused", "hookimpl"]

MAX_CODEC_NAME = 16
# Bytes by which a `required` codec's packed form may be longer than the object.
MAX_OVERHEAD = 128
# The name under which a tier stores bytes as they are.
NO_CODEC = "none"


class ValueName(NamedTuple):
    """What a value in a tier is: its packed object key, the 16 bytes of its object layout (zeros: unknown), and the
    name of its tenant in `[tenants]`, "" for none."""

    key: PackedKey
    layout: bytes
    tenant: str


class ValueRefused(ValueError):
    """A value that a codec does not open. `forged`: not what was sealed under this name; `unsealed`: plain where values
    must be sealed: both are deleted. `no_key`: no key opens it here and now; it stays."""

    def __init__(self, reason: Literal["forged", "no_key", "unsealed"], fact: str) -> None:
        super().__init__(fact)
        self.reason = reason


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

    def encode_named(self, data: memoryview, dtype: str, name: ValueName) -> Sequence[memoryview]:
        """As `encode_elements`, for the value of this name. A server calls this."""
        return self.encode_elements(data, dtype)

    def decode_named(self, packed: memoryview, out: memoryview, name: ValueName) -> bool:
        """As `decode_into`, for the value read under this name; raises `ValueRefused`, too. Returns whether the server
        should write the value again, because its form is an old one. A server calls this."""
        self.decode_into(packed, out)
        return False

    def problems(self) -> Sequence[str]:
        """Return what is wrong with the codec now, for the status of its tiers. Must not block."""
        return ()


@dataclass(frozen=True, kw_only=True)
class CodecProvider(Provider[O]):
    """A codec. `create` makes the codec that all tiers of one server share. What a `required` codec cannot pack is not
    stored, its tiers open only what a required codec packed, and a server does not start without it."""

    kind = "codec"
    create: Callable[[O], Codec]
    required: bool = False
