"""The conformance kit for key hashers: tests that every `KeyHasher` must pass. Runs under pytest.

Name the plugin; the kit finds, checks and creates it as a server does:

    from kvf_dev.testing import HasherConformance

    class TestMyHasher(HasherConformance):
        use = "myhasher"                # the entry point `hasher.myhasher`

or give a fixture that returns a factory, which makes a new hasher at each call:

    class TestMyHasher(HasherConformance):
        @pytest.fixture
        def make_hasher(self):
            return MyHasher

Digests are names: two prefixes that differ must not share a digest. A test of fixed digests, beside the kit,
shows that they stay as they are from release to release. Needs pytest alone.
"""

from __future__ import annotations

from kvf_dev.testing.hasher.digests import DigestTests, ExtraTests, PieceTests, TokenTests
from kvf_dev.testing.hasher.kit import HasherKit, MakeHasher
from kvf_dev.testing.hasher.serving import ServingTests

__all__ = ["HasherConformance", "HasherKit", "MakeHasher"]


# pytest runs the tests of the last base first: single digests before all that is made of them.
class HasherConformance(ServingTests, PieceTests, ExtraTests, TokenTests, DigestTests):
    """Base class of an author's test class; see the module. `HasherKit` lists the settings and fixtures."""
