"""What a vendor's driver raises: who hears of it, with all that was said, and what it costs the engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvf_dev.testing.accelerator import Event, SimulatedNode
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine, must_work
from kvf_dev.testing.transport.node import client_of, status_of
from kvframework.api.futures import Future
from kvframework.api.transport import StoreOutcome
from kvframework.config.load import load_config
from kvframework.errors import ConfigFieldError, DeviceError, DeviceLost
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from tests.core.registry.fake_distributions import install
from tests.devices.conftest import Start
from tests.devices.rigs import EXAMPLE, kvf_simdev, simdev
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

from tests.devices import faulty  # isort: skip  it imports the example

NHD = PAGED["nhd"]


def test_an_event_that_cannot_be_recorded_is_a_miss_and_leaks_nothing(
    start: Start, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start("sound")[1]()
    must_work(engine)
    before = node.events()
    assert before > 0

    def fails(self: object, event: Event, ready: object) -> None:
        raise DeviceError("the queue is full", hint=faulty.HINT)

    with monkeypatch.context() as patch:
        patch.setattr(kvf_simdev.SimEngine, "record", fails)
        request = engine.request()
        for _ in range(10):
            assert not engine.store(request, engine.source()).result(PATIENCE_S).ok
            assert not engine.load(request, engine.target()).result(PATIENCE_S).ok
    assert node.events() <= before
    assert engine.worker._instance.transfer.faults == 20  # type: ignore[union-attr]
    said = [record.getMessage() for record in caplog.records if "the queue is full" in record.getMessage()]
    assert 0 < len(said) < 20, "not once for every submit"
    assert faulty.HINT in said[0]
    finished, loaded = engine.worker.get_finished()
    assert request.request_id in finished & loaded
    assert [sorted(ids) for ids in engine.worker.take_failed_blocks()] == [sorted(ids) for ids in engine.target()]
    must_work(engine)


def test_a_request_that_cannot_be_sent_leaks_no_event(
    start: Start, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, make = start("sound")
    engine = make()
    must_work(engine)
    before = node.events()

    def fails(*_arguments: object, **_options: object) -> Future[StoreOutcome]:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(client, "store", fails)
        for _ in range(5):
            outcome = engine.store(engine.request(), engine.source()).result(PATIENCE_S)
            assert (outcome.ok, outcome.stored) == (False, 0)
    assert node.events() == before


def test_a_refused_memory_says_why_to_the_engine_and_in_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    make = start("refuses_memory")[1]
    with pytest.raises(DeviceError) as raised:
        make()
    error = raised.value
    assert (error.fact, error.where, error.available, error.hint) == (
        "it is not shared",
        "acme.open",
        "shared pools",
        faulty.HINT,
    )
    (line,) = [record.getMessage() for record in caplog.records if "could not open" in record.getMessage()]
    assert "acme.open: it is not shared" in line
    assert faulty.HINT in line


def test_a_copy_that_fails_says_why_in_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start("refuses_copies")[1]()
    assert not engine.store(engine.request(), engine.source()).result(PATIENCE_S).ok
    (line,) = [record.getMessage() for record in caplog.records if "a copy failed" in record.getMessage()]
    assert "acme.copy: no engine is free" in line
    assert faulty.HINT in line


def test_a_copier_that_ends_says_why(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    make = start("needs_a_library")[1]
    with pytest.raises(DeviceError, match="there is no library") as raised:
        make()
    assert (raised.value.where, raised.value.hint) == ("acme", faulty.HINT)
    assert faulty.HINT in caplog.text


def test_a_bug_in_a_driver_ends_its_copier_and_nothing_else(
    start: Start, node: SimulatedNode, caplog: pytest.LogCaptureFixture
) -> None:
    client, make = start("breaks_once")
    engine = make()
    request = engine.request()
    assert not engine.store(request, engine.source()).result(PATIENCE_S).ok
    assert engine.hit(request) == 0
    wait_until(lambda: engine.store(request, engine.source()).result(PATIENCE_S), PATIENCE_S, "a store")
    must_work(engine)
    (copier,) = status_of(client)["transports"]["breaks_once"]["devices"]  # type: ignore[index]
    assert copier["starts"] == 2
    assert "ValueError: an index is off" in copier["last_error"]
    assert node.violations() == []


def test_the_copier_logs_as_the_server_does(
    node: SimulatedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "acme", {"transport.is_broken": "tests.devices.faulty"}, {})
    paths = [str(site), str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")]), str(EXAMPLE.parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    settings = ("transport.0.use=is_broken", f"transport.0.node={node.path}", "server.chunk_size=16")
    with ServerProcess('log={format="json", level="info"}', *settings) as server:
        rig = simdev(str(node.path), module="tests.devices.faulty", transport="is_broken")
        with client_of(rig, server.endpoint) as client, pytest.raises(DeviceLost, match="no such luck"):
            KitEngine(rig, client, 1, NHD)
        rig.close()
        entries = [json.loads(line) for line in server.log.splitlines()]
    (told,) = [entry for entry in entries if "exception" in entry]
    assert told["exception"].endswith("ValueError: no such luck")
    assert (told["level"], told["logger"]) == ("error", "kvf_devices.copier")


@pytest.mark.parametrize("option", ["in_flight=0", "launch=0", "stall_s=0.5"])
def test_options_that_no_copier_could_work_with_are_refused(option: str) -> None:
    registry = PluginRegistry()
    registry.register(faulty, distribution="tests")
    config = load_config(None, ("transport.0.use=sound", f"transport.0.{option}"))
    with pytest.raises(ConfigFieldError, match=option.partition("=")[0]):
        complete_config(config, registry)
