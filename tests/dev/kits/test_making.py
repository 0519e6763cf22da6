"""What a kit makes in another process is the plugin under test, or the test is skipped and says why."""

from __future__ import annotations

import threading

import pytest

from kvf_dev.testing.kit import NamedKit


class Made:
    def __init__(self, name: object) -> None:
        self.name = name

    class Inner:
        """Without attributes."""


def test_a_class_goes_with_its_attributes() -> None:
    told = NamedKit().elsewhere(Made({"a": (1, b"\x00", None)}), "print(type(made).__qualname__, made.name)", seed=1)
    assert told == b"Made {'a': (1, b'\\x00', None)}\n"
    assert NamedKit().elsewhere(Made(b"x" * (1 << 20)), "print(len(made.name))", seed=1) == b"1048576\n"
    assert NamedKit().elsewhere(Made.Inner(), "print(made.__doc__)", seed=1) == b"Without attributes.\n"


def test_what_cannot_go_skips_the_test() -> None:
    class Local(Made):
        """One that no module has under its name."""

    for made in (Local("a"), Made(threading.Lock())):
        with pytest.raises(pytest.skip.Exception, match="give `use`"):
            NamedKit().elsewhere(made, "", seed=1)
