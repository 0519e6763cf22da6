"""The conformance kit for transports: tests that every transport must pass, on the simulated accelerator or a vendor's
device, see docs/plugins/transports.md. Some tests start separate processes, which make the rig again.
"""

from kvf_dev.testing.transport.engine_driven import EngineDriven
from kvf_dev.testing.transport.memory import Content, Driver, Faults, Memory, Pieces
from kvf_dev.testing.transport.order import Life, Order, Streams
from kvf_dev.testing.transport.rig import DeviceRig, HostRig, RigSpec, TransportRig, nbytes_of


# pytest runs the tests of the last base first: those of content, of which the simplest round trip is the first.
class TransportConformance(Life, EngineDriven, Pieces, Driver, Faults, Streams, Order, Memory, Content):
    """All tests of the kit. Give `use`, `make_rig`, or a `spec` fixture of class scope."""


__all__ = ["DeviceRig", "HostRig", "RigSpec", "TransportConformance", "TransportRig", "nbytes_of"]
