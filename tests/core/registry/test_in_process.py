"""Plugins that are registered as objects of this process, and the options of a provider."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvframework.api.codec import CodecProvider, hookimpl
from kvframework.errors import PluginBroken, PluginConflict, PluginError
from kvframework.registry.registry import PluginInfo, PluginRegistry
from tests.core.registry.fake_distributions import codec_module, install


class InProcess:
    """A plugin of a test."""

    def __init__(self, provider: object) -> None:
        self._provider = provider

    @hookimpl
    def kvf_codecs(self) -> list[object]:
        return [self._provider]


def codec(name: str, **changes: object) -> object:
    return CodecProvider(name=name, summary="", create=print, **changes)


def test_an_object_can_be_registered_in_process() -> None:
    registry = PluginRegistry([])
    registry.register(InProcess(codec("mine")), distribution="a test", version="3")
    assert registry.resolve("codec", "mine").name == "mine"
    assert registry.list() == [PluginInfo("mine", "codec", "a test", "3", "available", "")]
    registry.register(InProcess(codec("mine")))
    with pytest.raises(PluginConflict, match=r"a test 3, in-process"):
        registry.resolve("codec", "mine")


def test_an_object_registered_in_process_conflicts_with_an_installed_plugin(site: Path) -> None:
    install(site, "acme", {"codec.squeeze": "acme_squeeze"}, {"acme_squeeze": codec_module("squeeze")})
    registry = PluginRegistry()
    registry.register(InProcess(codec("squeeze")))
    with pytest.raises(PluginConflict, match=r"acme 1\.0, in-process"):
        registry.resolve("codec", "squeeze")


@pytest.mark.parametrize("plugin", [InProcess("no provider"), object()], ids=["wrong type", "no hooks"])
def test_a_refused_registration_leaves_nothing_behind(plugin: object) -> None:
    registry = PluginRegistry([])
    with pytest.raises(PluginError):
        registry.register(plugin)
    assert registry.list() == []
    assert not registry.manager.get_plugins()


def test_an_object_is_registered_once() -> None:
    registry, plugin = PluginRegistry([]), InProcess(codec("mine"))
    registry.register(plugin)
    with pytest.raises(PluginBroken, match="already"):
        registry.register(plugin)
    assert registry.resolve("codec", "mine").name == "mine"
