"""Owns the conformance kit for codecs: what every `Codec` must do. Runs under pytest.

Either name the plugin, which is found, checked and created as a server does it:

    from kvframework.testing import CodecConformance

    class TestMyCodec(CodecConformance):
        use = "mycodec"                 # the entry point `codec.mycodec`
        options = {"level": 3}          # as in `[codecs.mycodec]`, if there are any

or give a fixture that returns what makes one, each time anew:

    class TestMyCodec(CodecConformance):
        @pytest.fixture
        def make_codec(self):
            return lambda: MyCodec(level=3)

How small it packs is the codec's own affair: the server stores as it is what packing does not make smaller. Needs
pytest and hypothesis.
"""

from __future__ import annotations

from kvframework.testing.codec.damage import DamageTests
from kvframework.testing.codec.kit import CodecKit
from kvframework.testing.codec.memory import MemoryTests
from kvframework.testing.codec.packing import PackingTests

__all__ = ["CodecConformance", "CodecKit"]


class CodecConformance(PackingTests, DamageTests, MemoryTests):
    """Subclass it; see the module. `CodecKit` lists all that can be given."""
