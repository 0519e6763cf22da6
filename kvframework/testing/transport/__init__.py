"""The conformance kit for transports: tests that every transport must pass, on the simulated accelerator or a vendor's
device.

    import pytest
    from kvframework.testing import TransportConformance
    from kvframework.testing.transport import RigSpec

    class TestMyTransport(TransportConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def spec(cls):
            return RigSpec("my_rig:make", {})

`my_rig.make` returns a `TransportRig`: the transport's name and how an engine uses the device. Some tests start
processes of their own, which make the rig again.
"""

from kvframework.testing import needs_pytest  # noqa: F401 - says what to install
from kvframework.testing.transport.content import Content
from kvframework.testing.transport.driver import Driver
from kvframework.testing.transport.engine_driven import EngineDriven
from kvframework.testing.transport.faults import Faults
from kvframework.testing.transport.life import Life
from kvframework.testing.transport.memory import Memory
from kvframework.testing.transport.order import Order
from kvframework.testing.transport.pieces import Pieces
from kvframework.testing.transport.rig import RigSpec, TransportRig
from kvframework.testing.transport.streams import Streams


# pytest runs the tests of the last base first: those of content, of which the simplest round trip is the first.
class TransportConformance(Life, EngineDriven, Pieces, Driver, Faults, Streams, Order, Memory, Content):
    """All tests of the kit. Give a `spec` fixture of class scope."""


__all__ = ["RigSpec", "TransportConformance", "TransportRig"]
