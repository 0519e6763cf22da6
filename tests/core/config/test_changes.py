"""The differences between two configurations, by key."""

from __future__ import annotations

from pathlib import Path

from kvframework.config import load_config
from kvframework.config.schema import Config
from kvframework.registry import PluginRegistry, complete_config
from kvframework.running_config import CHANGED_NOW, Change, changes, flat, when


def config(*overrides: str) -> Config:
    return complete_config(load_config(None, overrides, {}), PluginRegistry())


def test_equal_configurations_do_not_differ() -> None:
    assert changes(config(), config()) == []


def test_two_ways_to_write_a_value_do_not_differ() -> None:
    assert changes(config(), config("l1.capacity=1024MiB", "log.level=info")) == []


def test_a_difference_has_its_key_and_both_values() -> None:
    found = changes(config(), config("server.ticket_s=5", "l1.capacity=2GiB"))
    assert found == [
        Change("server.ticket_s", 60.0, 5.0, "now"),
        Change("l1.capacity", 1 << 30, 2 << 30, "restart"),
    ]


def test_a_tier_that_comes_or_goes_needs_a_restart(tmp_path: Path) -> None:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path}", "l2.0.capacity=1GiB")
    for old, new in ((config(), config(*tier)), (config(*tier), config())):
        found = {change.key: change.when for change in changes(old, new)}
        assert {"l2.0.use", "l2.0.timeout_s"} <= found.keys()
        assert set(found.values()) == {"restart"}
    found = {change.key: change.when for change in changes(config(*tier), config(*tier, "l2.0.timeout_s=9"))}
    assert found == {"l2.0.timeout_s": "now"}


def test_a_value_that_is_set_for_the_first_time(tmp_path: Path) -> None:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path}", "l2.0.capacity=1GiB")
    assert changes(config(*tier), config(*tier, "l2.0.loads=5")) == [Change("l2.0.loads", None, 5, "restart")]


def test_an_unknown_key_needs_a_restart() -> None:
    assert when("tenants.acme.max") == when("l2.0.url") == when("observe") == "restart"


def test_every_key_that_changes_now_is_one(tmp_path: Path) -> None:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path}", "l2.0.capacity=1GiB")
    assert {key.replace("l2.0.", "l2.") for key in flat(config(*tier))} >= CHANGED_NOW
