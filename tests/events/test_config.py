"""The table `[events]`: what it refuses, before anything is bound."""

from __future__ import annotations

import pytest

from kvf_events.listener import state_folder
from kvf_events.options import EventsOptions
from kvframework.api.installing import install_command
from kvframework.config.load import load_config
from kvframework.errors import ConfigError, ConfigFieldError, EndpointError
from kvframework.preflight import refusals
from kvframework.registry.registry import PluginRegistry

IPC = "events.endpoint=ipc:///run/x/announced.sock"
TCP = "events.endpoint=tcp://127.0.0.1:5557"


def refusal(settings: list[str]) -> ConfigError | None:
    """The first error with which a server of these settings would refuse to start by its table `[events]`."""
    config = load_config(None, settings)
    return next(
        (
            each
            for each in refusals(config, PluginRegistry())
            if isinstance(each, ConfigError) and "[events]" in each.where
        ),
        None,
    )


def test_without_the_table_nothing_is_announced() -> None:
    assert load_config().listener == ()


def test_what_is_not_named_has_its_default() -> None:
    events = EventsOptions(endpoint="ipc:///run/x/announced.sock")
    assert (events.format, events.block_size, events.salted, events.engines) == ("map", 16, "withhold", ())
    assert refusal([IPC]) is refusal([TCP, "events.insecure=true"]) is None


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (["events.block_size=16"], ConfigFieldError, "endpoint"),
        ([TCP], EndpointError, "CURVE keys"),
        ([IPC, "events.replay=tcp://127.0.0.1:5558"], EndpointError, "CURVE keys"),
        ([IPC, "events.replay=ipc:///run/x/announced.sock"], ConfigFieldError, "same address"),
        ([IPC, "server.endpoint=ipc:///run/x/announced.sock"], ConfigFieldError, "same address"),
        ([IPC, "events.block_size=24"], ConfigFieldError, "does not divide the chunk of 256"),
        ([IPC, "events.salted=perhaps"], ConfigFieldError, "withhold"),
        ([IPC, "events.format=json"], ConfigFieldError, "array"),
        ([IPC, 'events.engines=["a@b"]'], ConfigFieldError, "engines"),
        ([IPC, 'events.engines=["a", "b", "a"]'], ConfigFieldError, "named twice"),
        ([IPC, "events.blocksize=16"], ConfigFieldError, "block_size"),
        (["events.endpoint=here"], EndpointError, "not an endpoint"),
    ],
)
def test_a_mistake_is_named(settings: list[str], error: type[ConfigError], words: str) -> None:
    found = refusal(settings)
    assert isinstance(found, error)
    assert words in f"{found} {found.available} {found.hint}"


def test_the_ledger_lies_where_state_lies() -> None:
    events = EventsOptions(endpoint="ipc:///run/x/announced.sock")
    assert str(state_folder(events, {"STATE_DIRECTORY": "/var/lib/kvf:/var/lib/other"})) == "/var/lib/kvf"
    assert str(state_folder(events, {"XDG_STATE_HOME": "/home/x/state"})) == "/home/x/state/kvframework"
    assert str(state_folder(events, {})).endswith("/.local/state/kvframework")
    named = EventsOptions(endpoint="ipc:///run/x/announced.sock", state="/srv/state")
    assert str(state_folder(named, {"STATE_DIRECTORY": "/var/lib/kvf"})) == "/srv/state"


def test_without_its_package_the_refusal_says_what_installs_it() -> None:
    config = load_config(None, [IPC])
    found = [each for each in refusals(config, PluginRegistry([])) if "[events]" in each.where]
    assert [(each.code, each.hint) for each in found] == [
        ("plugin.not_found", install_command(distribution="kvframework-events"))
    ]
