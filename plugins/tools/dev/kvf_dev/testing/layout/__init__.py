"""The conformance kit for layouts: tests that every `Layout` must pass. Runs under pytest, needs torch.

    import pytest
    from kvf_dev.testing import LayoutConformance
    from kvf_dev.testing.layout import LayoutSubject

    class TestMyLayout(LayoutConformance):
        use = "mylayout"                # the entry point `layout.mylayout`

        @pytest.fixture
        def make_subject(self):
            def make(memory, layers, blocks):
                caches = {f"layer.{n}": memory(blocks, 2, 16, 4, 8) for n in range(layers)}
                return LayoutSubject(caches, block_size=16, view=MyEngineView(caches))
            return make

`memory(*shape, dtype=...)` gives tensors as an engine's allocator does. The view is the engine's own access to its
memory (`EngineView`); the kit compares the layout's views with it. A layout that is no plugin yet comes from a fixture
`make_layout`, a function of its options.
"""

from __future__ import annotations

from kvf_dev.testing.layout.declaration import DeclarationTests, ObjectTests, RefusalTests
from kvf_dev.testing.layout.kit import LayoutKit, LayoutSubject, MakeLayout, MakeSubject, Slab
from kvf_dev.testing.layout.views import InstanceTests, ViewTests

__all__ = ["LayoutConformance", "LayoutKit", "LayoutSubject", "MakeLayout", "MakeSubject", "Slab"]


# pytest runs the tests of the last base first: views that are wrong for one instance are no matter of several.
class LayoutConformance(InstanceTests, RefusalTests, ObjectTests, ViewTests, DeclarationTests):
    """Base class of an author's test class, which gives `use` and a fixture `make_subject`; see the module."""
