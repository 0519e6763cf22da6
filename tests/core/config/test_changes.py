"""The differences between two configurations, by key."""

from __future__ import annotations

from pathlib import Path

from kvframework.config.load import load_config
from kvframework.config.schema import Config
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from kvframework.running_config import CHANGED_NOW, changes, changes_now, flat


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
