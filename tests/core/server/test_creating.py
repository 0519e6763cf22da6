"""What a plugin's `create` raises, or returns in place of what it should, ends the start and names plugin and table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvframework import errors
from kvframework.config.load import load_config
from kvframework.registry.registry import PluginRegistry
from kvframework.server import Server
from kvframework.storage.l2.sealed_tier import CodecTable
from tests.core.cli.command import run_process
from tests.core.registry.fake_distributions import install

SOURCE = """
from kvframework.api.codec import CodecProvider
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import ByteSize, Options
from kvframework.api.requests import RequestsProvider
from kvframework.api.tier import Tier, TierProvider, hookimpl
from kvframework.api.transport import TransportProvider
from kvframework.errors import ConfigFieldError, TierError
class Size(Options, frozen=True):
    capacity: ByteSize
def raises(*arguments):
    raise PermissionError(13, "Permission denied")
def exits(*arguments):
    raise SystemExit(3)
def returns(*arguments):
    return "text"
def refuses(options, context):
    raise ConfigFieldError("no such folder", where=f"{context.where} path")
def refuses_here(options, context):
    raise TierError("no such store")
class Nameless(Tier):
    def contains(self, keys, *, deadline): ...
    def get_into(self, keys, parts, *, deadline): ...
    def put(self, keys, parts, *, deadline): ...
    def delete(self, keys, *, deadline): ...
    def close(self): ...
def made(provider, **fields):
    return [provider(name=f.__name__, summary="", create=f, **fields) for f in (raises, exits, returns)]
@hookimpl
def kvf_tiers():
    others = [TierProvider(name=f.__name__, summary="", create=f) for f in (refuses, refuses_here)]
    nameless = TierProvider(name="nameless", summary="", create=lambda options, context: Nameless())
    return made(TierProvider) + others + [nameless]
@hookimpl
def kvf_memories():
    return [MemoryProvider(name=f.__name__, summary="", create=f, options=Size) for f in (raises, returns)]
@hookimpl
def kvf_eviction_policies():
    return made(EvictionProvider)
@hookimpl
def kvf_layouts():
    return made(LayoutProvider)
@hookimpl
def kvf_key_hashers():
    return made(HasherProvider)
@hookimpl
def kvf_codecs():
    return made(CodecProvider)
@hookimpl
def kvf_transports():
    return [TransportProvider(name=f.__name__, summary="", create=f, create_server=f) for f in (raises, returns)]
@hookimpl
def kvf_request_handlers():
    listed = RequestsProvider(name="listed", summary="", create=lambda options, services: [7])
    return made(RequestsProvider) + [listed]
"""
BY_THREE = ("eviction", "layout", "hasher", "codec", "requests", "tier")
NAMES = [
    *(f"{kind}.{name}" for kind in BY_THREE for name in ("raises", "exits", "returns")),
    *(f"tier.{name}" for name in ("refuses", "refuses_here", "nameless")),
    "memory.raises",
    "memory.returns",
    "transport.raises",
    "transport.returns",
    "requests.listed",
]
RAISED = "create raised PermissionError: [Errno 13] Permission denied"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "kvf-broken", dict.fromkeys(NAMES, "broken_create"), {"broken_create": SOURCE}, version="0.1.0")
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "place", "name"),
    [
        ("l2.0.use={}", "[[l2]] #1", "tier.{}"),
        ("l1.use={}", "[l1]", "memory.{}"),
        ("l1.eviction.use={}", "[l1.eviction]", "eviction.{}"),
        ("hasher.use={}", "[hasher]", "hasher.{}"),
        ("layout.0.use={}", "[[layout]] #1", "layout.{}"),
        ("transport.0.use={}", "[[transport]] #1", "transport.{}"),
        ("requests.0.use={}", "[[requests]] #1", "requests.{}"),
    ],
)
def test_every_kind_is_named_with_its_table(setting: str, place: str, name: str) -> None:
    for way, fact in (("raises", RAISED), ("returns", "create returned str")):
        with pytest.raises(errors.PluginBroken, match=re.escape(fact)) as caught:
            Server(load_config(None, [setting.format(way), "l1.capacity=1MiB"]))
        assert caught.value.fact.startswith(f"{name.format(way)} (kvf-broken 0.1.0): ")
        assert caught.value.where.endswith(place)


@pytest.mark.parametrize(
    ("setting", "code", "place", "fact"),
    [
        ("l2.0.use=refuses", "config.field", "[[l2]] #1 path", "no such folder"),
        ("l2.0.use=refuses_here", "storage.tier", "[[l2]] #1", "no such store"),
        ("l2.0.use=exits", "plugin.broken", "[[l2]] #1", "create raised SystemExit: 3"),
        ("l2.0.use=nameless", "plugin.broken", "[[l2]] #1", "the result of create has no name"),
        ("requests.0.use=listed", "plugin.broken", "[[requests]] #1", "a list of int"),
    ],
)
def test_what_a_plugin_says_itself_passes(setting: str, code: str, place: str, fact: str) -> None:
    with pytest.raises(errors.KVFrameworkError) as caught:
        Server(load_config(None, [setting, "l1.capacity=1MiB"]))
    assert caught.value.code == code
    assert caught.value.where.endswith(place)
    assert fact in caught.value.fact


def test_a_codec_is_named_when_it_is_first_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = ["l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB"]
    server = Server(load_config(None, ["codecs.allow=['raises']", "l1.capacity=1MiB", *tier]), PluginRegistry())
    try:
        (store,) = server.service.storage.tiers.stores
        table: CodecTable = store._codecs
        assert table.get("raises") is None
        assert f"codec.raises (kvf-broken 0.1.0): {RAISED}" in caplog.text
    finally:
        server.close()


def test_serve_ends_with_the_error_and_status_2(site: Path) -> None:
    ended = run_process("serve", "--set", "l2.0.use=raises", site=site)
    assert ended.returncode == 2
    assert f"[[l2]] #1: tier.raises (kvf-broken 0.1.0): {RAISED}" in ended.stderr
    assert "[plugin.broken]" in ended.stderr
    assert "unforeseen" not in ended.stderr
