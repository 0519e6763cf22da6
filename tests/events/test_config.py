"""The table `[events]`: what it refuses, before anything is bound."""

from __future__ import annotations

import pytest

from kvframework.config import load_config
from kvframework.errors import ConfigError, ConfigFieldError, EndpointError
from kvframework.events.publisher import _state_folder

IPC = "events.endpoint=ipc:///run/x/announced.sock"
TCP = "events.endpoint=tcp://127.0.0.1:5557"


def test_without_the_table_nothing_is_announced() -> None:
    assert load_config().events is None


def test_what_is_not_named_has_its_default() -> None:
    events = load_config(None, [IPC]).events
    assert events is not None
    assert (events.format, events.block_size, events.salted, events.engines) == ("map", 16, "withhold", ())
    assert load_config(None, [TCP, "events.insecure=true"]).events is not None


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (["events.block_size=16"], ConfigFieldError, "endpoint"),
        ([TCP], EndpointError, "CURVE keys"),
        ([IPC, "events.replay=tcp://127.0.0.1:5558"], EndpointError, "CURVE keys"),
        ([IPC, "events.replay=ipc:///run/x/announced.sock"], ConfigFieldError, "two sockets"),
        ([IPC, "server.endpoint=ipc:///run/x/announced.sock"], ConfigFieldError, "two sockets"),
        ([IPC, "events.block_size=24"], ConfigFieldError, "does not divide the chunk of 256"),
        ([IPC, "events.salted=perhaps"], ConfigFieldError, "withhold"),
        ([IPC, "events.format=json"], ConfigFieldError, "array"),
        ([IPC, 'events.engines=["a@b"]'], ConfigFieldError, "engines"),
        ([IPC, 'events.engines=["a", "b", "a"]'], ConfigFieldError, "named twice"),
        ([IPC, "events.blocksize=16"], ConfigFieldError, "block_size"),
        (["events.endpoint=here"], EndpointError, "no endpoint"),
    ],
)
def test_a_mistake_is_named(settings: list[str], error: type[ConfigError], words: str) -> None:
    with pytest.raises(error) as caught:
        load_config(None, settings)
    assert words in f"{caught.value} {caught.value.available} {caught.value.hint}"


def test_the_ledger_lies_where_state_lies() -> None:
    events = load_config(None, [IPC]).events
    assert events is not None
    assert str(_state_folder(events, {"STATE_DIRECTORY": "/var/lib/kvf:/var/lib/other"})) == "/var/lib/kvf"
    assert str(_state_folder(events, {"XDG_STATE_HOME": "/home/x/state"})) == "/home/x/state/kvframework"
    assert str(_state_folder(events, {})).endswith("/.local/state/kvframework")
    named = load_config(None, [IPC, "events.state=/srv/state"]).events
    assert named is not None
    assert str(_state_folder(named, {"STATE_DIRECTORY": "/var/lib/kvf"})) == "/srv/state"
