"""A function and its options pass to another process by their names, or are refused with the reason."""

from __future__ import annotations

import sys
from types import ModuleType

import msgspec
import pytest

from kvframework.api.plugin import ByteSize, Options, Secret
from kvframework.errors import PluginBroken
from kvframework.supervise.child import NamedCall


class Sizes(Options, frozen=True):
    first: ByteSize
    rest: tuple[ByteSize, ...] = ()
    word: Secret = "w"


class Holder(Options, frozen=True):
    thing: object = None


class Maker:
    @staticmethod
    def inside(options: Sizes) -> Sizes:
        return options


def make(options: Sizes) -> Sizes:
    return options


@pytest.mark.parametrize("function", [make, Maker, Maker.inside])
def test_it_is_found_again_with_equal_options(function: object) -> None:
    options = Sizes(ByteSize(5), (ByteSize(1 << 40),), "hidden")
    call = NamedCall.of(function, options, where="here")  # type: ignore[arg-type]
    assert "hidden" not in repr(call)
    found, received = msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=NamedCall).resolve()
    assert found is function
    assert received == options
    assert [type(each) for each in (received.first, *received.rest)] == [ByteSize, ByteSize]


def refused(function: object, options: object) -> PluginBroken:
    with pytest.raises(PluginBroken) as caught:
        NamedCall.of(function, options, where="here")  # type: ignore[arg-type]
    assert caught.value.where == "here"
    assert caught.value.hint
    return caught.value


def test_what_has_no_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.make = made = lambda options: options  # type: ignore[attr-defined]
    made.__module__, made.__qualname__ = "__main__", "make"
    monkeypatch.setitem(sys.modules, "__main__", main)
    for function in (lambda options: options, Maker().inside.__get__, made, 5):
        assert "cannot be found by its name" in refused(function, Sizes(ByteSize(1))).fact
    assert "make of __main__" in refused(made, Sizes(ByteSize(1))).fact


def test_options_that_cannot_be_sent_are_refused() -> None:
    assert refused(make, {"first": 1}).available == "a struct"
    assert "Holder cannot be sent to another process: Maker is not" in refused(make, Holder(Maker())).fact
    assert "Sizes cannot be sent to another process" in refused(make, Sizes("text")).fact  # type: ignore[arg-type]
