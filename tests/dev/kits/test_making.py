"""What a kit makes in another process is the plugin under test, or the test is skipped and says why."""

from __future__ import annotations

import threading

import pytest

from kvf_dev.testing.making import NamedKit


class Made:
    def __init__(self, name: object) -> None:
        self.name = name

    class Inner:
        """Without attributes."""


class Slotted:
    __slots__ = ("name",)


def test_a_class_goes_with_its_attributes() -> None:
    told = NamedKit().elsewhere(Made({"a": (1, b"\x00", None)}), "print(type(made).__qualname__, made.name)", seed=1)
    assert told.decode().split(maxsplit=1) == ["Made", "{'a': (1, b'\\x00', None)}\n"]


def test_what_is_larger_than_a_command_line_goes() -> None:
    assert NamedKit().elsewhere(Made(b"x" * (1 << 20)), "print(len(made.name))", seed=1) == b"1048576\n"


def test_a_class_in_a_class_goes() -> None:
    assert NamedKit().elsewhere(Made.Inner(), "print(made.__doc__)", seed=1) == b"Without attributes.\n"


class Local:
    """Stands for one that no module has under its name."""


Local.__qualname__ = "somewhere.<locals>.Local"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Local(), "no class that can be imported"),
        (Made(threading.Lock()), "the attributes of Made are no literals"),
        (Slotted(), "the attributes of Slotted are no literals"),
        (len, "no class that can be imported"),
    ],
    ids=["a local class", "a lock", "slots", "a builtin"],
)
def test_what_cannot_go_skips_the_test(made: object, why: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"give `use`.*{why}"):
        NamedKit().elsewhere(made, "", seed=1)
