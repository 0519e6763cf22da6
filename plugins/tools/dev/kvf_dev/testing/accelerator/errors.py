"""The errors of the simulated accelerator's runtime, as a vendor's library has its own."""

from __future__ import annotations


class AcceleratorError(RuntimeError):
    """One call or one operation failed."""


class Misuse(AcceleratorError):
    """A mistake that a device would let pass, with wrong bytes as the likely result. Also noted on the node, see
    `SimulatedNode.violations`. `kind` is a short stable name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class ContextLost(AcceleratorError):
    """This process's context is poisoned, or the device has vanished: every further call fails."""
