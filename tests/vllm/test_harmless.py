"""What the connector raises does not reach vLLM, and what it registers with vLLM cannot harm an engine without it."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from types import ModuleType

import pytest

from kvf_vllm.registration import CONNECTORS, register
from kvframework.client import ErrorNotes, harmless
from kvframework.errors import ServerGone
from tests.support.processes import ran


class Connector:
    def __init__(self) -> None:
        self.counted = 0
        self.errors = ErrorNotes(self.count)
        self.cleaned: list[object] = []

    def count(self) -> None:
        self.counted += 1

    @harmless(lambda: (0, False), then=lambda self, request: self.cleaned.append(request))
    def matched(self, request: object) -> object:
        if request == "good":
            return 7, True
        raise ValueError(request)

    @harmless(list, then=lambda self: self.missing)
    def taken(self) -> list[int]:
        raise OSError

    @harmless(then=lambda _self, number: number + 1)
    def planned(self, number: int) -> int:
        raise TypeError

    @harmless(bool)
    def _asked(self) -> bool:
        raise ServerGone("no server")


def test_what_is_raised_is_counted_logged_once_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    connector = Connector()
    assert connector.matched("good") == (7, True)
    assert (connector.matched("bad"), connector.matched("worse")) == ((0, False), (0, False))
    assert connector.cleaned == ["bad", "worse"]
    assert (connector.errors, connector.counted) == ({"matched: ValueError": 2}, 2)
    assert [record.message for record in caplog.records] == [
        "matched failed, and the engine continues without the cache: ValueError('bad')"
    ]
    assert connector.taken() == []
    assert connector.errors["taken: OSError"] == connector.errors["taken: AttributeError"] == 1
    assert connector.planned(4) == 5
    assert connector._asked() is False
    last = caplog.records[-1]
    assert last.message.startswith("asked failed, ")
    assert last.exc_info is None


def test_a_process_that_is_asked_to_end_ends() -> None:
    class Ending(Connector):
        @harmless()
        def ended(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Ending().ended()


def test_every_process_of_vllm_finds_the_registration() -> None:
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvframework")
    assert found.load() is register


def test_without_vllm_or_with_another_one_nothing_is_registered_and_nothing_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = "vllm.distributed.kv_transfer.kv_connector.factory"
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    with caplog.at_level(logging.DEBUG, "kvf_vllm.registration"):
        register()
        monkeypatch.setattr(sys.modules[path], "KVConnectorFactory", object(), raising=False)
        register()
        monkeypatch.setitem(sys.modules, path, None)
        register()
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * 3

    registered: list[tuple[str, str, str]] = []

    class Factory:
        _registry: dict[str, object] = {}  # noqa: RUF012

        @classmethod
        def register_connector(cls, name: str, module: str, attribute: str) -> None:
            registered.append((name, module, attribute))
            cls._registry[name] = attribute

    monkeypatch.setitem(sys.modules, path, ModuleType(path))
    monkeypatch.setattr(sys.modules[path], "KVConnectorFactory", Factory, raising=False)
    register()
    register()
    assert registered == [(name, module, name) for name, module in CONNECTORS.items()]


def test_the_entry_point_imports_next_to_nothing() -> None:
    program = (
        "import sys, kvf_vllm.registration;"
        "print([each for each in sys.modules if each.split('.')[0] in ('kvframework', 'zmq', 'torch', 'msgspec')])"
    )
    done = ran(sys.executable, "-c", program)
    assert done.stdout.strip() == "[]"
