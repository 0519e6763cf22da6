"""A configuration against the plugins that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvframework.api.codec import CodecProvider, hookimpl
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import ByteSize, Options
from kvframework.api.tier import TierProvider
from kvframework.api.transport import TransportProvider
from kvframework.config.load import load_config
from kvframework.errors import ConfigFieldError, PluginNotFound, PluginWrongKind
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config, resolve_table


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
