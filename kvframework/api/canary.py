"""`EngineView`: an engine's own access to its KV memory, against which a declared layout is checked at registration.

Engine side only. The view must not use the declaration: it reads and writes as the engine's attention does.
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
    """One spare block per layer group, which may be written at registration, and the engine's own access to it.

    `spare_blocks` holds a block id per layer group. At the first registration nothing else may use these blocks; after
    a reconnect they are only read. Layer groups and layers count in the order of the declaration; `plane` 0 is K (or
    the one latent plane), 1 is V.
    """

    spare_blocks: Sequence[int]

    def declared(self, layout: KVLayout) -> None:
        """Receives the declaration, once and before any read or write: it gives the layers of each group. Optional."""
        return

    @abstractmethod
    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        """Returns a copy of the block, `[slots per block, heads, head_dim]`, in the engine's dtype."""

    @abstractmethod
    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        """Writes `values`, in the shape that `read` returns, into the block. Bit-exact for all values."""
