"""The conformance kit for transports: tests that every transport must pass, on the simulated accelerator or a vendor's
device.

    import pytest
    from kvf_dev.testing import TransportConformance
    from kvf_dev.testing.transport import RigSpec

    class TestMyTransport(TransportConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def spec(cls):
            return RigSpec("my_rig:make", {})

`my_rig.make` returns a `TransportRig`: the transport's name and how an engine uses the device. Some tests start
processes of their own, which make the rig again.
"""

from kvf_dev.testing import needs_pytest  # noqa: F401 - says what to install
from kvf_dev.testing.transport.content import Content, Pieces
from kvf_dev.testing.transport.engine_driven import EngineDriven
from kvf_dev.testing.transport.life import Life
from kvf_dev.testing.transport.memory import Driver, Faults, Memory
from kvf_dev.testing.transport.order import Order, Streams
from kvf_dev.testing.transport.rig import RigSpec, TransportRig


# pytest runs the tests of the last base first: those of content, of which the simplest round trip is the first.
class TransportConformance(Life, EngineDriven, Pieces, Driver, Faults, Streams, Order, Memory, Content):
    """All tests of the kit. Give a `spec` fixture of class scope."""


__all__ = ["RigSpec", "TransportConformance", "TransportRig"]
