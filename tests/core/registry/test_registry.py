"""The registry against real distributions on disk: what it finds, what it refuses, and that it imports nothing else.
Options of plugins: how they are described, and what of them is shown."""

from __future__ import annotations

import contextlib
import enum
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta
from rich.pretty import pretty_repr

from kvframework import errors
from kvframework.api.installing import install_command
from kvframework.api.plugin import ByteSize, NoOptions, Options, Secret, SecretUrl
from kvframework.masking import shown_options
from kvframework.registry.discovery import EntryPointInfo, discover
from kvframework.registry.registry import PluginInfo, PluginRegistry
from kvframework.registry.tables import OptionInfo, describe_options
from tests.core.registry.fake_distributions import HOOKS, codec_module, info, install, marking


def test_an_installed_plugin_is_discovered_and_resolved(site: Path) -> None:
    install(
        site, "acme-kvf", {"codec.squeeze": "acme_squeeze"}, {"acme_squeeze": codec_module("squeeze")}, version="2.5"
    )
    assert EntryPointInfo("codec", "squeeze", "acme-kvf", "2.5", "acme_squeeze", 1) in discover()
    registry = PluginRegistry()
    assert registry.resolve("codec", "squeeze").summary == "fake"
    assert info(registry, "codec", "squeeze") == PluginInfo("squeeze", "codec", "acme-kvf", "2.5", "available", "")


def test_an_entry_point_may_name_an_object_in_a_module(site: Path) -> None:
    source = """
        from kvframework.api.codec import CodecProvider, hookimpl
        class Plugin:
            @hookimpl
            def kvf_codecs(self):
                return (CodecProvider(name="squeeze", summary="an object", create=lambda options: None),)
        plugin = Plugin()
    """
    install(site, "acme", {"codec.squeeze": "acme_object:plugin"}, {"acme_object": source})
    assert PluginRegistry().resolve("codec", "squeeze").summary == "an object"


def test_threads_that_load_one_plugin_at_once_all_get_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instance of an engine registers in a thread of its own."""
    install(site, "acme", {"codec.squeeze": "acme_squeeze"}, {"acme_squeeze": codec_module("squeeze")})
    registry = PluginRegistry()
    both, register = threading.Barrier(2), registry.manager.register

    def met(*arguments: Any, **named: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1.0)  # for the other thread, which waits elsewhere
        return register(*arguments, **named)

    monkeypatch.setattr(registry.manager, "register", met)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: registry.resolve("codec", "squeeze").name, range(2)))
    assert found == ["squeeze", "squeeze"]


def test_an_absent_plugin_says_what_is_there_and_what_was_probably_meant() -> None:
    registry = PluginRegistry()
    with pytest.raises(errors.PluginNotFound) as caught:
        registry.resolve("tier", "rediss", where="kvf.toml: [[l2]] #1")
    assert caught.value.where == "kvf.toml: [[l2]] #1"
    assert caught.value.available == ", ".join(registry.names("tier"))
    assert caught.value.hint == "did you mean 'redis'?"
    with pytest.raises(errors.PluginNotFound, match=r"entry point codec\.lz4"):
        registry.resolve("codec", "lz4")


def test_a_name_of_another_kind_is_pointed_at() -> None:
    with pytest.raises(errors.PluginWrongKind, match="of another kind: eviction"):
        PluginRegistry().resolve("hasher", "lru")
    with pytest.raises(errors.PluginWrongKind, match="unknown kind of plugin 'store'"):
        PluginRegistry().resolve("store", "redis")


def test_two_offers_of_one_name_are_an_error_only_for_who_names_it(site: Path) -> None:
    for name in ("acme", "bolt"):
        modules = {f"{name}_codec": codec_module("squeeze", name)}
        install(site, name, {"codec.squeeze": f"{name}_codec", f"codec.{name}": f"{name}_codec"}, modules)
    registry = PluginRegistry()
    assert registry.resolve("codec", "acme").name == "acme"
    with pytest.raises(errors.PluginConflict, match=r"acme 1\.0, bolt 1\.0"):
        registry.resolve("codec", "squeeze")
    statuses = {(line.distribution, line.status) for line in registry.list() if line.name == "squeeze"}
    assert statuses == {("acme", "conflict"), ("bolt", "conflict")}
    assert "bolt_codec" not in sys.modules


def test_a_probe_says_why_a_plugin_cannot_run(site: Path) -> None:
    source = """
        from kvframework.api.codec import CodecProvider, hookimpl
        @hookimpl
        def kvf_codecs():
            reason = "acme-lib is missing: pip install acme-kvf[lib]"
            return [CodecProvider(name="heavy", summary="", create=print, probe=lambda: reason)]
    """
    install(site, "acme", {"codec.heavy": "acme_heavy"}, {"acme_heavy": source})
    registry = PluginRegistry()
    assert info(registry, "codec", "heavy").status == "available"
    line = info(registry, "codec", "heavy", probe=True)
    assert (line.status, line.reason) == ("unavailable", "acme-lib is missing: pip install acme-kvf[lib]")
    with pytest.raises(errors.PluginUnavailable, match=r"pip install acme-kvf\[lib\]"):
        registry.resolve("codec", "heavy")


def test_nothing_is_imported_but_what_is_named(site: Path, tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    for name in ("named", "idle"):
        modules = {f"acme_{name}": marking(marker) + codec_module(name)}
        install(site, f"acme-{name}", {f"codec.{name}": f"acme_{name}"}, modules)

    def imported(statement: str) -> list[str]:
        marker.unlink(missing_ok=True)
        code = f"from kvframework.registry.registry import PluginRegistry\nregistry = PluginRegistry()\n{statement}"
        path = f"import sys\nsys.path.insert(0, {str(site)!r})\n"
        subprocess.run([sys.executable, "-c", path + code], check=True, timeout=240)
        return marker.read_text().split() if marker.exists() else []

    assert imported("registry.list(); registry.names('codec')") == []
    assert imported("registry.resolve('codec', 'named'); registry.list()") == ["acme_named"]
    assert sorted(imported("registry.list(probe=True)")) == ["acme_idle", "acme_named"]


def test_importing_the_machinery_imports_no_plugin_and_nothing_heavy() -> None:
    code = """
import sys
from kvframework.registry.registry import PluginRegistry
registry = PluginRegistry()
registry.list()
registry.resolve("hasher", "sha256")
heavy = {"torch", "numpy", "transformers", "redis"} & set(sys.modules)
plugins = {name for name in sys.modules if name.startswith("kvf_") and "." not in name}
assert not heavy, heavy
assert plugins == {"kvf_hashers"}, plugins
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_module_with_several_entry_points_is_registered_once(site: Path, tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    source = marking(marker) + codec_module("one", "two")
    install(site, "acme", {"codec.one": "acme_pair", "codec.two": "acme_pair"}, {"acme_pair": source})
    registry = PluginRegistry()
    assert [registry.resolve("codec", name).name for name in ("one", "two")] == ["one", "two"]
    assert len(registry.manager.get_plugins()) == 1
    assert marker.read_text().split() == ["acme_pair"]


def test_resolving_one_plugin_calls_no_hook_of_another(site: Path) -> None:
    install(site, "acme", {"codec.bad": "acme_bad"}, {"acme_bad": f"{HOOKS}@hookimpl\ndef kvf_codecs(): raise OSError"})
    install(site, "bolt", {"codec.fine": "bolt_fine"}, {"bolt_fine": codec_module("fine")})
    registry = PluginRegistry()
    with pytest.raises(errors.PluginBroken):
        registry.resolve("codec", "bad")
    calls: list[str] = []

    def before(name: str, implementations: Sequence[Any], arguments: object) -> None:
        calls.extend(implementation.plugin.__name__ for implementation in implementations)

    registry.manager.add_hookcall_monitoring(before, lambda *_: None)
    registry.resolve("codec", "fine")
    registry.resolve("codec", "fine")
    assert calls == ["bolt_fine"]


def test_options_that_are_wrong_point_at_the_list_of_them() -> None:
    registry = PluginRegistry()
    provider = registry.resolve("tier", "filesystem")
    with pytest.raises(errors.ConfigFieldError, match="missing key `path`") as caught:
        registry.options(provider, {}, where="[[l2]] #1")
    assert caught.value.hint == "`kvframework plugins info tier.filesystem` lists its options"
    with pytest.raises(errors.ConfigFieldError) as caught:
        registry.options(provider, {"pth": "/tmp"}, where="[[l2]] #1")
    assert caught.value.hint == "did you mean 'path'?"


def test_a_plugin_of_ours_that_is_not_installed_is_an_error_with_the_line_that_installs_it() -> None:
    with pytest.raises(errors.PluginNotFound) as refused:
        PluginRegistry([]).describe("tier", "redis")
    assert refused.value.hint == install_command(distribution="kvframework-redis")
    with pytest.raises(errors.PluginNotFound) as misspelt:
        PluginRegistry([]).describe("tier", "rediss")
    assert "redis" in misspelt.value.hint


class Mode(enum.Enum):
    fast = "fast"
    safe = "safe"


class Inner(Options, frozen=True):
    token: Secret = ""


class Everything(Options, frozen=True):
    url: Annotated[SecretUrl, Meta(min_length=1, description="where")]
    key: Secret = ""
    keys: tuple[Secret, ...] = ()
    size: ByteSize = ByteSize(1024)
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    count: Annotated[int, Meta(ge=2)] = 2
    level: Literal["low", "high"] = "low"
    mode: Mode = Mode.fast
    hosts: list[str] = []  # noqa: RUF012 - msgspec copies it
    pair: tuple[int, str] = (1, "x")
    headers: dict[str, str] = {}  # noqa: RUF012
    maybe: bool | None = None
    inner: Inner = Inner()
    pin: Annotated[Secret | None, Meta(description="may be missing")] = None
    mirror: Annotated[SecretUrl | None, Meta(description="may be missing")] = None
    tokens: Annotated[dict[str, Secret], Meta(description="by host")] = {}  # noqa: RUF012
    chain: Annotated[list[Secret] | None, Meta(description="may be missing")] = None


def test_options_are_described_for_the_reader_of_a_toml_file() -> None:
    found = {option.name: option for option in describe_options(Everything)}
    assert found["url"] == OptionInfo("url", "string", True, None, "where", True)
    assert found["key"] == OptionInfo("key", "string", False, "", "", True)
    assert {name: option.type for name, option in found.items()} == {
        "url": "string",
        "key": "string",
        "keys": "array of string",
        "size": "size",
        "share": "number > 0 and <= 1",
        "count": "integer >= 2",
        "level": '"high" or "low"',
        "mode": '"fast" or "safe"',
        "hosts": "array of string",
        "pair": "array of integer, string",
        "headers": "table of string",
        "maybe": "boolean",
        "inner": "table",
        "pin": "string",
        "mirror": "string",
        "tokens": "table of string",
        "chain": "array of string",
    }
    secret = {"url", "key", "keys", "pin", "mirror", "tokens", "chain"}
    assert {name for name, option in found.items() if option.secret} == secret
    assert found["hosts"].default == []
    assert describe_options(NoOptions) == []


PASSWORD = "hunter2"


@pytest.mark.parametrize(
    ("options", "name", "shown"),
    [
        (Everything(url=f"x://me:{PASSWORD}@host/0?key={PASSWORD}"), "url", "x://***@host/0"),
        (Everything(url=f"nonsense {PASSWORD}"), "url", "***"),
        (Everything(url="x://host", key=PASSWORD), "key", "***"),
        (Everything(url="x://host", key=""), "key", ""),
        (Everything(url="x://host", hosts=[f"y://a:{PASSWORD}@b", "plain"]), "hosts", ["y://***@b", "plain"]),
        (Everything(url="x://host", headers={"via": f"y://:{PASSWORD}@b"}), "headers", {"via": "y://***@b"}),
        (Everything(url="x://host", inner=Inner(PASSWORD)), "inner", {"token": "***"}),
        (Everything(url="x://host", size=ByteSize(7)), "size", 7),
        (Everything(url="x://host", keys=(PASSWORD,)), "keys", ["***"]),
        (Everything(url="x://host", pin=PASSWORD), "pin", "***"),
        (Everything(url="x://host"), "pin", None),
        (Everything(url="x://host", mirror=f"y://a:{PASSWORD}@b"), "mirror", "y://***@b"),
        (Everything(url="x://host", tokens={"a": PASSWORD}), "tokens", {"a": "***"}),
        (Everything(url="x://host", chain=[PASSWORD]), "chain", ["***"]),
    ],
)
def test_secrets_are_neither_shown_nor_in_a_repr(options: Everything, name: str, shown: object) -> None:
    assert shown_options(options)[name] == shown
    assert PASSWORD not in repr(options) + pretty_repr(options)


def test_a_repr_of_harmless_options_is_the_usual_one() -> None:
    assert repr(NoOptions()) == "NoOptions()"
    assert repr(Everything(url="x://host")).startswith("Everything(url='x://host', key='', keys=[], size=1024, ")
