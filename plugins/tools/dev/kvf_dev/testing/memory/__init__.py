"""The conformance kit for the memory of L1: tests that every `Memory` must pass. Runs under pytest.

    from kvf_dev.testing import MemoryConformance

    class TestMyMemory(MemoryConformance):
        use = "mymemory"                            # the entry point `memory.mymemory`

A memory that is no plugin yet, or whose size is not the option `capacity`, comes from a fixture:

        @pytest.fixture
        def make_memory(self):
            return lambda capacity: MyMemory(capacity)

Of a provider with `keeps` it tests memory that outlives its server, too; beside a fixture `make_memory` that needs

        @pytest.fixture
        def make_kept_memory(self):
            return lambda capacity, kept: MyMemory(capacity, kept)

Sizes are up to 40 MiB. Needs pytest alone.
"""

from __future__ import annotations

from kvf_dev.testing.memory.content import ContentTests, ReadinessTests
from kvf_dev.testing.memory.end import EndTests, KeptTests
from kvf_dev.testing.memory.kit import MakeKeptMemory, MakeMemory, MemoryKit

__all__ = ["MakeKeptMemory", "MakeMemory", "MemoryConformance", "MemoryKit"]


# pytest runs the tests of the last base first: bytes before readiness, the end, and what outlives it.
class MemoryConformance(KeptTests, EndTests, ReadinessTests, ContentTests):
    """Base class of an author's test class, which gives `use`, and `options` if there are any; or a fixture
    `make_memory`, a factory that takes the size in bytes."""
