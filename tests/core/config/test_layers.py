"""The layers of a configuration: where a value came from, what `--set table.key=value` changes and refuses, and how two
configurations differ."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.plugin import ByteSize
from kvframework.api.toml import parse_toml, toml_value
from kvframework.config.load import Layers, apply_override, load_config, parse_value, read_layers
from kvframework.config.schema import Config
from kvframework.errors import ConfigFieldError
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from kvframework.running_config import CHANGED_NOW, changes, changes_now, flat


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvf.toml"
    path.write_text('[l1]\nhigh_watermark = 0.8\n[[layout]]\nuse = "paged"\n[[layout]]\nuse = "other"\naxes = ["a"]\n')
    return path


def layers(file: Path | None = None, *overrides: str, variable: str = "") -> Layers:
    return read_layers(file, overrides, {"KVFRAMEWORK_CONFIG": variable})


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        (("l1", "high_watermark"), "{file}: [t]"),
        (("l1", "use"), "embedded default"),
        (("l1", "capacity"), "default"),
        (("l1", "eviction", "use"), "embedded default"),
        (("hasher", "use"), "embedded default"),
        (("transport", 0, "use"), "embedded default"),
        (("layout", 1, "axes"), "{file}: [t]"),
        (("layout", 0, "axes"), "default"),
        (("requests",), "default"),
    ],
)
def test_the_layer_that_decides_is_named(file: Path, path: tuple[str | int, ...], origin: str) -> None:
    assert layers(file).origin(path, "[t]") == origin.format(file=file)


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("l1.high_watermark=0.5", ("l1", "high_watermark")),
        ("layout.1.axes=[]", ("layout", 1, "axes")),
        ('l1={use="pinned"}', ("l1", "use")),
        ("layout=[]", ("layout",)),
        ("l1.headers.key=1", ("l1", "headers")),
    ],
)
def test_an_override_is_named_without_its_value(file: Path, override: str, path: tuple[str | int, ...]) -> None:
    named = layers(file, override)
    assert named.origin(path, "[t]") == f"--set {override.partition('=')[0]}"
    assert named.origin(("server", "workers"), "[t]") == "default"


def test_the_last_override_counts(file: Path) -> None:
    assert layers(file, "l1.capacity=1", "l1={}").origin(("l1", "capacity"), "[t]") == "--set l1"


def test_the_layers_below_an_override_stay_what_they_were(file: Path) -> None:
    changed = layers(file, "layout.0.axes=[1]", "transport.1.use=x", "l1.high_watermark=0.1")
    assert changed.own == layers(file).own
    assert changed.default == layers().default


def test_a_file_named_by_the_environment(file: Path) -> None:
    named = layers(variable=str(file))
    assert (named.file, named.by_variable) == (file, True)
    assert named.origin(("l1", "high_watermark"), "[t]") == f"{file} (KVFRAMEWORK_CONFIG): [t]"
    assert not layers(file, variable="/elsewhere").by_variable


scalars = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab. "\n', min_size=1), inner, max_size=3),
)


@given(values)
def test_what_is_written_as_toml_reads_as_the_same(value: object) -> None:
    assert parse_toml(f"value = {toml_value(value)}", where="") == {"value": value}


@given(st.integers(min_value=0, max_value=1 << 45))
def test_a_size_is_written_exactly(size: int) -> None:
    read = parse_toml(f"value = {toml_value(ByteSize(size))}", where="")["value"]
    assert ByteSize.parse(read) == size


@pytest.mark.parametrize("text", ["9" * 400, "1." + "9" * 400 + "GiB", "9" * 400 + "TiB", "", "-1", "1 XiB"])
def test_what_is_no_size_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as"):
        ByteSize.parse(text)


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError):
        toml_value(None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("0.5", 0.5),
        ("true", True),
        ('"4"', "4"),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("2026-01-02", datetime.date(2026, 1, 2)),
        ("4GiB", "4GiB"),
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("", ""),
        ("1\n[server]\nworkers = 3", "1\n[server]\nworkers = 3"),
        ("a=b", "a=b"),
    ],
)
def test_a_value_is_toml_or_else_itself(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_overrides_apply_in_order_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kvf.toml"
    path.write_text('[[l2]]\nuse = "redis"\nurl = "redis://a"\n')
    overrides = ["l1.capacity=4GiB", "l2.0.url=redis://b", "l2.1.use=fs", "l2.1.path=/x", "server.workers=3"]
    config = load_config(path, [*overrides, "server.workers=4"], environ={})
    assert config.l1.memory.options == {"capacity": "4GiB"}
    assert [(l2.tier.use, l2.tier.options) for l2 in config.l2] == [
        ("redis", {"url": "redis://b"}),
        ("fs", {"path": "/x"}),
    ]
    assert config.server.workers == 4
    assert config.source == str(path)


def test_arrays_of_tables_are_made_and_extended_without_a_file() -> None:
    config = load_config(overrides=["l2.0.use=redis", "transport.0.use=other", "layout.3.use=third"], environ={})
    assert [l2.tier.use for l2 in config.l2] == ["redis"]
    assert [table.use for table in config.transport] == ["other"]
    assert [table.use for table in config.layout] == ["paged", "opaque", "dynamic_cache", "third"]


def test_a_whole_table_can_be_set() -> None:
    raw: dict[str, object] = {}
    apply_override(raw, "l2.0={use = 'redis', url = 'x'}")
    apply_override(raw, "l2.0.url=y")
    assert raw == {"l2": [{"use": "redis", "url": "y"}]}


def test_the_default_is_never_changed() -> None:
    load_config(overrides=["l1.capacity=1", "transport.0.use=other"], environ={})
    config = load_config(environ={})
    assert config.l1.memory.options == {"capacity": "1GiB"}
    assert config.transport[0].use == "cpu_gather"


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("server.workers", "not of the form"),
        ("=4", "not of the form"),
        ("server..workers=4", "not of the form"),
        (".workers=4", "not of the form"),
        ("l2.1.use=redis", "'1' as the index of 0"),
        ("layout.first.use=x", "'first' as the index of 3"),
        ("layout.-1.use=x", "'-1' as the index of 3"),
        ("layout.9=x", "'9' as the index of 3"),
        ("l1.use.x=1", "in a value, not in a table"),
        ("l1.use.x.y=1", ", which lies in a value, not in a table"),
    ],
)
def test_a_bad_override_says_so(override: str, fact: str) -> None:
    with pytest.raises(ConfigFieldError) as caught:
        load_config(overrides=[override], environ={})
    assert caught.value.where == f"--set {override.partition('=')[0]}", "the value may be a secret"
    assert fact in caught.value.fact
    assert "table.key=value" in caught.value.hint


def test_a_wrong_value_points_at_the_overrides() -> None:
    with pytest.raises(ConfigFieldError) as caught:
        load_config(overrides=["server.workers=many"], environ={})
    assert caught.value.where == "embedded default with --set: [server] workers"
    with pytest.raises(ConfigFieldError, match="expected an array of tables"):
        load_config(overrides=["l2.use=redis"], environ={})


def test_a_path_of_thousands_of_parts_is_refused_and_cut() -> None:
    with pytest.raises(ConfigFieldError, match="3000 levels deep") as caught:
        load_config(overrides=[f"{'.'.join(['a'] * 3000)}=1"], environ={})
    assert len(str(caught.value)) < 400


def test_a_value_of_thousands_of_brackets_is_a_text_as_anything_else_that_is_no_toml() -> None:
    with pytest.raises(ConfigFieldError) as caught:
        load_config(overrides=[f"log.level={'[' * 3000}{']' * 3000}"], environ={})
    assert caught.value.where == "embedded default with --set: [log] level"


def config(*overrides: str) -> Config:
    return complete_config(load_config(None, overrides, {}), PluginRegistry())


def test_equal_configurations_do_not_differ() -> None:
    assert changes(config(), config()) == {}


def test_two_ways_to_write_a_value_do_not_differ() -> None:
    assert changes(config(), config("l1.capacity=1024MiB", "log.level=info")) == {}


def test_a_difference_has_its_key_and_whether_it_changes_now() -> None:
    found = changes(config(), config("server.ticket_s=5", "l1.capacity=2GiB"))
    assert found == {"server.ticket_s": True, "l1.capacity": False}


def test_a_tier_that_comes_or_goes_needs_a_restart(tmp_path: Path) -> None:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path}", "l2.0.capacity=1GiB")
    for old, new in ((config(), config(*tier)), (config(*tier), config())):
        found = changes(old, new)
        assert {"l2.0.use", "l2.0.timeout_s"} <= found.keys()
        assert not any(found.values())
    assert changes(config(*tier), config(*tier, "l2.0.timeout_s=9")) == {"l2.0.timeout_s": True}


def test_a_value_that_is_set_for_the_first_time(tmp_path: Path) -> None:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path}", "l2.0.capacity=1GiB")
    assert changes(config(*tier), config(*tier, "l2.0.loads=5")) == {"l2.0.loads": False}


def test_an_unknown_key_needs_a_restart() -> None:
    assert not any(map(changes_now, ("tenants.acme.max", "l2.0.url", "observe")))


def test_every_key_that_changes_now_is_one(tmp_path: Path) -> None:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path}", "l2.0.capacity=1GiB")
    assert {key.replace("l2.0.", "l2.") for key in flat(config(*tier))} >= CHANGED_NOW
