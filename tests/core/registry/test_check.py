"""Plugins against what names them: hooks, a configuration, objects of this process, and the options of a provider, how
they are described and what of them is shown."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from kvframework.api import hookspecs
from kvframework.api.codec import CodecProvider, hookimpl
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import ByteSize, Options
from kvframework.api.tier import TierProvider
from kvframework.api.transport import TransportProvider
from kvframework.config.load import load_config
from kvframework.errors import (
    ConfigFieldError,
    PluginBroken,
    PluginConflict,
    PluginError,
    PluginNotFound,
    PluginWrongKind,
)
from kvframework.registry.discovery import KINDS
from kvframework.registry.registry import PluginInfo, PluginRegistry
from kvframework.registry.tables import complete_config, resolve_table
from tests.core.registry.fake_distributions import codec_module, install


class Memory(Options, frozen=True):
    capacity: ByteSize


class Store(Options, frozen=True):
    url: str


def never(*arguments: object) -> object:
    raise AssertionError("a check creates nothing")


class Everything:
    """All kinds that the embedded default names, and an L2 store."""

    @hookimpl
    def kvf_memories(self) -> list[object]:
        return [MemoryProvider(name="pinned", summary="", create=never, options=Memory)]

    @hookimpl
    def kvf_tiers(self) -> list[object]:
        return [TierProvider(name="store", summary="", create=never, options=Store)]

    @hookimpl
    def kvf_eviction_policies(self) -> list[object]:
        return [EvictionProvider(name="two_queues", summary="", create=never)]

    @hookimpl
    def kvf_key_hashers(self) -> list[object]:
        return [HasherProvider(name="sha256", summary="", create=never)]

    @hookimpl
    def kvf_transports(self) -> list[object]:
        return [TransportProvider(name="cpu_gather", summary="", create=never)]

    @hookimpl
    def kvf_layouts(self) -> list[object]:
        return [LayoutProvider(name=name, summary="", create=never) for name in ("paged", "opaque", "dynamic_cache")]

    @hookimpl
    def kvf_codecs(self) -> list[object]:
        return [CodecProvider(name="zlib", summary="", create=never)]


@pytest.fixture
def registry() -> PluginRegistry:
    made = PluginRegistry([])
    made.register(Everything())
    return made


def test_the_options_of_a_table_come_back_validated(registry: PluginRegistry) -> None:
    provider, options = resolve_table(registry, load_config(environ={}).l1.memory, MemoryProvider)
    assert provider.name == "pinned"
    assert options == Memory(ByteSize(1 << 30))


@pytest.mark.parametrize(
    ("overrides", "error", "where"),
    [
        (["l1.use=store"], PluginWrongKind, "[l1]"),
        (["l2.0.use=pinned"], PluginWrongKind, "[[l2]] #1"),
        (["l2.0.use=store"], ConfigFieldError, "[[l2]] #1"),
        (["l2.0.use=store", "l2.0.url=x", "l2.0.codec=zstd"], PluginNotFound, "[[l2]] #1 codec"),
        (["transport.1.use=warp"], PluginNotFound, "[[transport]] #2"),
        (["l1.eviction.use=lfu"], PluginNotFound, "[l1.eviction]"),
        (["hasher.seed=1"], ConfigFieldError, "[hasher]"),
        (["requests.0.use=blend"], PluginNotFound, "[[requests]] #1"),
        (["layout.0.use=sha256"], PluginWrongKind, "[[layout]] #1"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(
    registry: PluginRegistry, overrides: list[str], error: type[Exception], where: str
) -> None:
    config = load_config(overrides=overrides, environ={})
    with pytest.raises(error) as caught:
        complete_config(config, registry)
    assert caught.value.where == f"embedded default with --set: {where}"


def test_a_codec_is_checked_like_any_plugin(registry: PluginRegistry) -> None:
    overrides = ["l2.0.use=store", "l2.0.url=x", "l2.0.codec=zlib"]
    complete_config(load_config(overrides=overrides, environ={}), registry)


def test_a_misspelt_core_key_is_told_among_the_options(registry: PluginRegistry, tmp_path: Path) -> None:
    path = tmp_path / "kvf.toml"
    path.write_text('[l1]\ncapacity = "1MiB"\nhigh_watermrk = 0.5\n')
    with pytest.raises(ConfigFieldError) as caught:
        complete_config(load_config(path, environ={}), registry)
    assert caught.value.hint == "did you mean 'high_watermark'?"


HOOKS: dict[str, Callable[[], object]] = {
    name: hook for name, hook in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("kvf_")
}


def test_every_kind_has_a_hook_and_every_hook_a_kind() -> None:
    assert HOOKS
    assert {kind.hook for kind in KINDS.values()} == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented(name: str) -> None:
    summary = (inspect.getdoc(HOOKS[name]) or "").partition("\n\n")[0]
    assert len(summary) > 20
    assert summary.endswith(".")


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
