"""The sockets of events: one server has them at a time, and no other file is taken for one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import zmq

from kvf_events import sockets as module
from kvf_events.history import Numbered
from kvf_events.options import EventsOptions
from kvf_events.sockets import EventSockets
from kvframework.errors import EndpointError
from kvframework.messaging.server import sockets as listener_sockets
from tests.support.listener_context import listener_context
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_sockets, "_BIND_S", 0.1)


def config(folder: Path) -> EventsOptions:
    folder.chmod(0o700)
    return EventsOptions(endpoint=f"ipc://{folder}/told.sock", replay=f"ipc://{folder}/again.sock")


def is_readable(sockets: EventSockets, endpoint: str) -> bool:
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.linger = 0
        reader.subscribe(b"")
        reader.connect(endpoint)
        while not sockets.wait(0.05)[0]:
            pass
        sockets.publish(Numbered(b"t", 1, b"p"))
        return bool(reader.recv_multipart()[2] == b"p")


@pytest.mark.parametrize("key", ["endpoint", "replay"])
def test_a_second_server_does_not_take_the_sockets_of_the_first(key: str, tmp_path: Path) -> None:
    """libzmq would: it removes whatever lies at the path, and at its end what lies there then."""
    named = config(tmp_path)
    first = EventSockets(named, listener_context())
    other = f"ipc://{tmp_path}/other.sock"
    second = (
        EventsOptions(endpoint=named.endpoint, replay=other)
        if key == "endpoint"
        else EventsOptions(endpoint=other, replay=named.replay)
    )
    try:
        with pytest.raises(EndpointError, match="another server"):
            EventSockets(second, listener_context())
        assert is_readable(first, named.endpoint)
    finally:
        first.close()
    with closing(EventSockets(named, listener_context())) as after:
        assert is_readable(after, named.endpoint)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "again.sock").write_text("a letter")
    with pytest.raises(EndpointError, match="not a socket"):
        EventSockets(config(tmp_path), listener_context())
    assert (tmp_path / "again.sock").read_text() == "a letter"
    assert [each.name for each in tmp_path.iterdir()] == ["again.sock"]


def test_a_port_in_use_is_named() -> None:
    port = free_port()
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind(f"tcp://127.0.0.1:{port}")
        with pytest.raises(EndpointError, match="in use") as caught:
            EventSockets(EventsOptions(endpoint=f"tcp://127.0.0.1:{port}", insecure=True), listener_context())
    assert str(port) in caught.value.where


def test_a_reader_that_asks_without_an_end_has_its_turn_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_AT_ONCE", 10)
    named = config(tmp_path)
    with (
        closing(EventSockets(named, listener_context())) as sockets,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as reader,
    ):
        reader.linger = 0
        reader.connect(named.replay)
        for number in range(95):
            reader.send_multipart([b"", number.to_bytes(8, "big")])
        answers = []
        while not answers or answers[-1] != 94:
            answers += [asked for _, asked in sockets.wait(10.0)[1]]
        assert len(answers) >= 10


def test_a_reader_that_subscribes_without_an_end_is_disconnected_and_others_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq keeps all that is subscribed to: one reader filled 400 MB a second."""
    monkeypatch.setattr(module, "MOST_SUBSCRIBED_BYTES", 10_000)
    named = config(tmp_path)
    with (
        closing(EventSockets(named, listener_context())) as sockets,
        zmq.Context() as context,
        context.socket(zmq.SUB) as good,
        context.socket(zmq.XSUB) as bad,
    ):
        for each in (good, bad):
            each.linger = 0
            each.connect(named.endpoint)
        good.subscribe(b"t")
        before = sockets._news
        for number in range(200):
            bad.send(b"\1" + number.to_bytes(100, "big"))
        while sockets._news is before:
            sockets.wait(1.0)
        bad.close()
        while not good.poll(10):
            sockets.wait(0.05)
            sockets.publish(Numbered(b"t", 1, b"p"))
        assert good.recv_multipart()[2] == b"p"
        assert is_readable(sockets, named.endpoint)
    assert list(tmp_path.iterdir()) == []
