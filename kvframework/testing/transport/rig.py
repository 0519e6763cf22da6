"""Owns what a vendor gives so that the kit can drive a transport on the vendor's device: `TransportRig`, and how to
make one in any process."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class TransportRig(ABC):
    """One process's access to the device, as an engine has it. The kit makes it by `RigSpec` in every process it needs.

    `transport` is the transport's name; `engine_options` and `server_options` are for the two sides. `plugins` are
    modules to be registered where the distribution is not installed. `synchronous` is for transports whose submits
    return when all is done, as engine-driven ones do.
    """

    transport: str
    engine_options: Mapping[str, object] = {}
    server_options: Mapping[str, object] = {}
    plugins: Sequence[str] = ()
    synchronous: bool = False

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Contiguous memory on the device, by torch's name of the dtype: a tensor, or what the layouts take for one."""

    @abstractmethod
    def write(self, tensor: torch.Tensor, data: bytes) -> None:
        """Writes all bytes of a contiguous tensor, behind what `write_later` has queued. Blocking."""

    @abstractmethod
    def read(self, tensor: torch.Tensor) -> bytes:
        """All bytes of a contiguous tensor, read as a kernel of the engine would, behind what `write_later` has queued.
        Blocking."""

    @abstractmethod
    def write_later(self, tensor: torch.Tensor, data: bytes) -> object:
        """Queues a write that takes effect a good while later (0.2 s); the event behind it, to be given to a submit."""

    def event(self) -> object:
        """What the engine gives with a submit behind no queued work; None is fine for most."""
        return None

    def stream(self) -> object:
        """A stream of the engine's beside its current one, as it is given to `DeviceFuture.wait`. Raises
        `NotImplementedError` if streams cannot wait for a transfer; the tests that need it are skipped."""
        raise NotImplementedError("this device's streams cannot wait for a transfer")

    def read_later(self, tensor: torch.Tensor, stream: object | None) -> Callable[[], bytes | None]:
        """Queues a read of all bytes of a contiguous tensor on a stream (None: the current one), as a kernel of the
        engine would. Never blocks. What it returns gives the bytes once the stream has come past the read, None before;
        it may raise what went wrong."""
        raise NotImplementedError("this device's streams cannot wait for a transfer")

    @contextmanager
    def holding_copies(self) -> Iterator[None]:
        """The next copy of the transport stops in its middle until the block ends. Raises `NotImplementedError` if the
        device cannot be held; the tests that need it are skipped."""
        raise NotImplementedError("this device's copies cannot be held")
        yield

    def held(self) -> bool:
        """Whether a copy stands still in `holding_copies`."""
        return False

    def problems(self) -> list[str]:
        """What was done wrong so far, where the device can tell: in any process."""
        return []

    @contextmanager
    def holding_writes(self) -> Iterator[None]:
        """What `write_later` queues takes no effect until the block ends. Raises `NotImplementedError` if the device
        cannot be held so; the tests that need it are skipped."""
        raise NotImplementedError("this device's writes cannot be held")
        yield

    def fail_copy(self) -> None:
        """The next copy of the transport fails on the device, which is well otherwise. Raises `NotImplementedError` if
        that cannot be had; the tests that need it are skipped. Likewise `poison`."""
        raise NotImplementedError("this device's copies cannot be made to fail")

    def poison(self) -> None:
        """The next copy of the transport makes the context of its process useless, as an illegal access does."""
        raise NotImplementedError("this device's contexts cannot be poisoned")

    def open_elsewhere(self) -> int:
        """How many allocations of engines are open in other processes; 0 if that cannot be told."""
        return 0

    def events(self) -> int:
        """How many interprocess events of engines there are, here and open elsewhere; 0 if that cannot be told."""
        return 0

    def close(self) -> None:
        """Frees what the rig holds. Idempotent."""
        return


@dataclass(frozen=True)
class RigSpec:
    """A rig that any process can make: `factory` is "module:function", called with `arguments`."""

    factory: str
    arguments: Mapping[str, object] = field(default_factory=dict)

    def make(self) -> TransportRig:
        module, _, name = self.factory.partition(":")
        rig = getattr(importlib.import_module(module), name)(**self.arguments)
        assert isinstance(rig, TransportRig)
        return rig
