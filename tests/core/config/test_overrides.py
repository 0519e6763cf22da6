"""`--set table.key=value`: what it changes, and what it refuses."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from kvframework.config.layers import apply_override, parse_value
from kvframework.config.load import load_config
from kvframework.errors import ConfigFieldError


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
