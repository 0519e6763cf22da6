"""The conformance kit for codecs: tests that every `Codec` must pass. Runs under pytest.

Name the plugin; the kit finds, checks and creates it as a server does:

    from kvf_dev.testing import CodecConformance

    class TestMyCodec(CodecConformance):
        use = "mycodec"                 # the entry point `codec.mycodec`
        options = {"level": 3}          # as in `[codecs.mycodec]`, if there are any

or give a fixture that returns a factory, which makes a new codec at each call:

    class TestMyCodec(CodecConformance):
        @pytest.fixture
        def make_codec(self):
            return lambda: MyCodec(level=3)

The kit does not judge the ratio: the server stores an object unpacked if packing does not make it smaller. Needs
pytest alone.
"""

from __future__ import annotations

from kvf_dev.testing.codec.damage import DamageTests
from kvf_dev.testing.codec.kit import CodecKit
from kvf_dev.testing.codec.packing import MemoryTests, PackingTests

__all__ = ["CodecConformance", "CodecKit"]


# pytest runs the tests of the last base first: what is packed before damage.
class CodecConformance(MemoryTests, DamageTests, PackingTests):
    """Base class of an author's test class; see the module. `CodecKit` lists the settings and fixtures."""
