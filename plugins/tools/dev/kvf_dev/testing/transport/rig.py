"""`TransportRig`, the vendor's part by which the kit drives a transport on the vendor's device, and its recipe for any
process."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest

from kvframework.api.layout import TensorLike


class TransportRig(ABC):
    """One process's access to the device, as an engine has it. The kit makes it by `RigSpec` in every process it needs.

    `transport` is the transport's name; `engine_options` and `server_options` are for the two sides. `plugins` are
    modules that the kit registers where the distribution is not installed. `synchronous` is for transports whose
    submits return when the copy is done, as with engine-driven ones. What a device cannot do skips the test: leave that
    method out.
    """

    transport: str
    engine_options: Mapping[str, object] = {}
    server_options: Mapping[str, object] = {}
    plugins: Sequence[str] = ()
    synchronous: bool = False

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: str) -> TensorLike:
        """Return contiguous memory on the device, by torch's name of the dtype."""

    @abstractmethod
    def write(self, tensor: TensorLike, data: bytes) -> None:
        """Write all bytes of a contiguous tensor, after the writes of `write_later`. Blocking."""

    @abstractmethod
    def read(self, tensor: TensorLike) -> bytes:
        """Return all bytes of a contiguous tensor, read as a kernel of the engine would, after the writes of
        `write_later`. Blocking."""

    @abstractmethod
    def write_later(self, tensor: TensorLike, data: bytes) -> object:
        """Queue a write that takes effect a good while later (0.2 s); return the event behind it, for a submit."""

    def event(self) -> object:
        """Return the engine's event for a submit behind no queued work; None is fine for most."""
        return None

    def stream(self) -> object:
        """Return a stream of the engine's beside its current one, as an argument of `DeviceFuture.wait`."""
        pytest.skip("this device's streams cannot wait for a transfer")

    def read_later(self, tensor: TensorLike, stream: object | None) -> Callable[[], bytes | None]:
        """Queue a read of all bytes of a contiguous tensor on a stream (None: the current one), as a kernel of the
        engine would. Never blocks. The returned function gives the bytes once the stream has passed the read, None
        before; it may raise the read's error."""
        pytest.skip("this device's streams cannot wait for a transfer")

    def holding_copies(self) -> AbstractContextManager[None]:
        """Stop the next copy of the transport in its middle until the block ends."""
        pytest.skip("this device's copies cannot be held")

    def held(self) -> bool:
        """Return whether a copy stands still in `holding_copies`."""
        return False

    def holding_writes(self) -> AbstractContextManager[None]:
        """Delay the effect of `write_later` until the block ends."""
        pytest.skip("this device's writes cannot be held")

    def fail_copy(self) -> None:
        """Make the next copy of the transport fail on a device that works otherwise."""
        pytest.skip("this device's copies cannot be made to fail")

    def poison(self) -> None:
        """Make the next copy of the transport poison the context of its process, as an illegal access does."""
        pytest.skip("this device's contexts cannot be poisoned")

    def problems(self) -> list[str]:
        """Return the mistakes noted so far, where the device can tell: in any process."""
        return []

    def open_elsewhere(self) -> int:
        """Return how many allocations of engines are open in other processes; 0 if unknown."""
        return 0

    def events(self) -> int:
        """Return how many interprocess events of engines there are, here and open elsewhere; 0 if unknown."""
        return 0

    def streams(self) -> int:
        """Return how many streams there are that have to be destroyed, here and in other processes; 0 if unknown."""
        return 0

    def elsewhere(self) -> TransportRig:
        """Return a rig of another device of the machine, in this process."""
        pytest.skip("there is no other device")

    def close(self) -> None:
        """Free the rig's resources. Idempotent."""
        return


def nbytes_of(tensor: TensorLike) -> int:
    """Return the bytes of a contiguous tensor."""
    return math.prod(tensor.shape) * tensor.element_size()


@dataclass(frozen=True)
class RigSpec:
    """A rig that any process can make: `factory` is "module:function", called with `arguments`."""

    factory: str
    arguments: Mapping[str, object] = field(default_factory=dict)

    def make(self) -> TransportRig:
        """Import the factory and return its rig."""
        module, _, name = self.factory.partition(":")
        rig = getattr(importlib.import_module(module), name)(**self.arguments)
        assert isinstance(rig, TransportRig)
        return rig
