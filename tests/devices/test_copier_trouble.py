"""A copier whose arena cannot be pinned yet or at all, or whose events cannot be closed: what engines learn of it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.transport.engine import must_work
from kvf_dev.testing.transport.node import status_of
from kvframework.client import KVClient
from kvframework.errors import DeviceError
from tests.core.client import test_transport_choice as choice
from tests.devices.conftest import Start
from tests.support.waiting import wait_until

from tests.devices import faulty  # isort: skip  it imports the example


def copier(client: KVClient, transport: str) -> dict[str, Any]:
    (device,) = status_of(client)["transports"][transport]["devices"]  # type: ignore[index]
    return device


def test_an_arena_that_cannot_be_pinned_refuses_the_registration(start: Start) -> None:
    make = start("cannot_pin")[1]
    with pytest.raises(DeviceError, match="so much memory may not be locked") as raised:
        make(1)
    assert (raised.value.where, raised.value.hint) == ("acme.pin", faulty.HINT)


def test_where_the_arena_cannot_be_pinned_the_next_transport_is_taken(
    node: SimulatedNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"ipc://{tmp_path}/s.sock"
    with (
        KVClient(endpoint, plugins=choice.registry(), deadline_scale=20.0) as client,
        choice.serving(client, node, "cannot_pin", "sound"),
    ):
        adapter = choice.worker(client, node)
        adapter.register_kv_caches(choice.on_devices(node, 0), block_size=16)
        assert choice.taken(client) == ["sound"]
        assert choice.stores(client, adapter)
        assert copier(client, "cannot_pin")["starts"] == 1
        adapter.close()
    assert "transport cannot_pin is left out, because it cannot use this engine's memory" in caplog.text


def test_a_registration_waits_for_the_pin_which_is_no_stall(start: Start) -> None:
    client, make = start("pins_slowly", stall_s=1.0)
    began = time.monotonic()
    engine = make(1)
    assert time.monotonic() - began >= faulty.PIN_S
    must_work(engine)
    assert copier(client, "pins_slowly")["starts"] == 1


def test_an_event_that_cannot_be_closed_ends_no_copier(start: Start, node: SimulatedNode) -> None:
    client, make = start("cannot_close_events")
    first, second = make(1), make(2)
    must_work(first)
    must_work(second)
    before = copier(client, "cannot_close_events")
    first.close()
    wait_until(lambda: copier(client, "cannot_close_events")["instances"] == 1, what="the end of the first instance")
    must_work(second)
    after = copier(client, "cannot_close_events")
    assert (after["pid"], after["starts"]) == (before["pid"], 1)
    second.close()
    wait_until(lambda: node.events() == 0, what="no event")
    assert node.violations() == []


def test_a_device_that_is_lost_at_an_event_ends_its_copier(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    client, make = start("is_lost_at_an_event")
    engine = make(1)
    must_work(engine)
    with caplog.at_level(logging.ERROR):
        engine.close()
        wait_until(lambda: copier(client, "is_lost_at_an_event")["pid"] is None, what="the end of the copier")
    assert "the event is in use" in copier(client, "is_lost_at_an_event")["last_error"]
