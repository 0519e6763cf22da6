"""Owns `EngineView`: an engine's own way to its KV memory, against which a declared layout is checked at registration.

Engine side only. The view must not go through the declaration: it is how the engine's attention reads and writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvframework.api.layout import KVLayout

if TYPE_CHECKING:
    import torch


__all__ = ["EngineView"]


class EngineView(ABC):
    """One block per layer group that may be written at registration, and the engine's own access to it.

    `spare_blocks` holds a block id per layer group. At the first registration nobody else may use these blocks; after a
    reconnect they are only read. Layer groups and layers count in the order of the declaration; `plane` 0 is K (or the
    one latent plane), 1 is V.
    """

    spare_blocks: Sequence[int]

    def declared(self, layout: KVLayout) -> None:
        """Told once what was declared, before anything is read or written: which layers stand in which group.
        Optional."""
        return

    @abstractmethod
    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        """A copy of the block, `[slots per block, heads, head_dim]`, in the engine's dtype."""

    @abstractmethod
    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        """Writes `values`, shaped like what `read` returns, into the block. Bit-exact, whatever the values are."""
