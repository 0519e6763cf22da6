"""A simulated accelerator at driver level, for transports of devices that this machine lacks.

`SimulatedNode` makes devices in a directory; each process that uses them makes an `Accelerator`. Mistakes that a real
device hides (work out of order, freed memory, the wrong process) are refused and noted.
"""

from kvf_dev.testing.accelerator.node import (
    NODE_VARIABLE,
    AcceleratorError,
    ContextLost,
    Misuse,
    SimulatedNode,
    Violation,
)
from kvf_dev.testing.accelerator.runtime import Accelerator, DeviceTensor, Event, Stream

__all__ = [
    "NODE_VARIABLE",
    "Accelerator",
    "AcceleratorError",
    "ContextLost",
    "DeviceTensor",
    "Event",
    "Misuse",
    "SimulatedNode",
    "Stream",
    "Violation",
]
