"""The choice between the arena and the wire, by what the transport's own options say."""

from __future__ import annotations

from typing import Literal

import pytest

from kvframework.api.plugin import NoOptions, Options
from kvframework.api.transport import TransportProvider, hookimpl
from kvframework.registry.registry import PluginRegistry
from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.workload import TransferPath, transport_options


class WithPath(Options, frozen=True):
    path: Literal["auto", "arena", "wire"] = "auto"


def registry(options: type[Options]) -> PluginRegistry:
    class Transports:
        @hookimpl
        def kvf_transports(self) -> list[TransportProvider[Options]]:
            return [TransportProvider(name="cpu_gather", summary="", create=print, options=options)]  # type: ignore[arg-type]

    plugins = PluginRegistry(())
    plugins.register(Transports())
    return plugins


def test_a_transport_with_a_choice_is_told() -> None:
    plugins = registry(WithPath)
    assert transport_options(TransferPath.wire, plugins) == {"path": "wire"}
    assert transport_options(TransferPath.arena, plugins) == {"path": "arena"}


def test_a_transport_without_one_takes_the_arena() -> None:
    plugins = registry(NoOptions)
    assert transport_options(TransferPath.arena, plugins) == {}
    with pytest.raises(BenchUnavailable, match="this server has no wire path"):
        transport_options(TransferPath.wire, plugins)
