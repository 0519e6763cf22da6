"""Every release's golden messages are read today to the values that were meant, and today's are still written as they
are recorded."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvframework.api.plugin import Message
from kvframework.errors import KVFrameworkError, RemoteError
from kvframework.messaging.client.liveness import LivenessLink
from kvframework.storage.namespaces import FORMAT_VERSION, Damaged, decode_record, unseal
from kvframework.wire.frames import ERROR_TYPE, ErrorPayload, decode, error_from, split
from kvframework.wire.protocol import REQUESTS
from tests.core.golden import recording
from tests.core.golden.contents import raw
from tests.core.golden.samples import every_field, explicit, required_fields
from tests.core.server.in_process import serving
from tests.support.wire_client import WireClient

RECORDED = {release: recording.recorded(release) for release in recording.releases()}
MESSAGES = [
    pytest.param(document, message, id=f"{release} {name} {message['what']}")
    for release, documents in RECORDED.items()
    for name, document in documents.items()
    for message in document.get("messages", ())
]


def of_each_release(name: str) -> list[Any]:
    return [pytest.param(documents[name], id=release) for release, documents in RECORDED.items()]


def matches(recorded: Any, today: Any) -> bool:
    """Whether all that was recorded is there; today there may be further fields."""
    if isinstance(recorded, dict):
        return recorded.keys() <= today.keys() and all(matches(each, today[name]) for name, each in recorded.items())
    if isinstance(recorded, list):
        return len(recorded) == len(today) and all(map(matches, recorded, today))
    return bool(recorded == today)


def read(document: Any, message: Any) -> Message:
    envelope = split([raw(frame) for frame in message["frames"]])
    assert envelope.request_id == recording.REQUEST_ID
    assert [bytes(each) for each in envelope.buffers] in ([], list(recording.BUFFERS))
    if envelope.type == ERROR_TYPE:
        return decode(envelope.payload, ErrorPayload, where="golden")
    spec = REQUESTS[envelope.type]
    return decode(envelope.payload, spec.payload if "request" in message["what"] else spec.response, where="golden")


@pytest.mark.parametrize(("document", "message"), MESSAGES)
def test_what_a_release_wrote_is_read_to_equal_values(document: Any, message: Any) -> None:
    assert matches(message["value"], explicit(read(document, message)))


def test_every_code_of_a_release_is_still_known() -> None:
    importlib.import_module("kvf_plan.errors")  # some codes were the core's in 0.2
    for documents in RECORDED.values():
        for message in documents["wire/ERROR.json"]["messages"]:
            error = error_from(read(None, message))  # type: ignore[arg-type]
            assert error.code == message["value"]["code"]
            assert isinstance(error, RemoteError) == (error.code == "remote")


@pytest.mark.parametrize("document", of_each_release("storage/envelope.json"))
def test_values_in_l2_are_opened_or_of_another_format(document: Any) -> None:
    zstd = pytest.importorskip("kvf_codecs.zstd", reason="zstandard is not installed")
    for value in document["values"]:
        stored, packed = raw(value["object"]), raw(value["packed"])
        place = memoryview(bytearray(len(stored)))
        place[: len(packed)] = packed
        header, key, layout = (raw(value[each]) for each in ("header", "key", "layout"))
        received = len(header) + len(packed)
        if document["format"] != FORMAT_VERSION:
            with pytest.raises(Damaged, match="format version"):
                unseal(header, key, place, received=received, layout=layout)
            continue
        codec, found = unseal(header, key, place, received=received, layout=layout)
        assert (codec, bytes(found)) == (value["codec"], packed)
        if codec == "zstd":
            zstd.ZstdCodec(1).decode_into(memoryview(bytes(found)), place)
        if codec == "planes":
            pytest.importorskip("kvf_codecs.planes").PlanesCodec().decode_into(memoryview(bytes(found)), place)
        assert bytes(place) == stored


@pytest.mark.parametrize("document", of_each_release("storage/namespace_record.json"))
def test_namespace_records_in_l2_are_read(document: Any) -> None:
    record = decode_record(raw(document["record, then zeros"]).ljust(document["bytes"], b"\0"))
    assert matches(document["value"], explicit(record))


@pytest.mark.parametrize("document", of_each_release("wire/liveness.json"))
def test_the_server_answers_a_token_as_recorded(document: Any) -> None:
    with serving() as server, WireClient(server.endpoint, liveness=False) as client:
        assert len(client.hello.session) == len(raw(document["the client sends"]))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as live:
            live.settimeout(5)
            live.connect(client.hello.liveness)
            live.sendall(client.hello.session)
            answer, fds, _, _ = socket.recv_fds(live, 2, 2)
            for fd in fds:
                os.close(fd)
    assert (answer, len(fds)) == (raw(document["the server answers with one descriptor"]), 1)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        here = os.getcwd()
        os.chdir(tmp_path)  # socket paths are short
        try:
            listener.bind("live")
            listener.listen()
            yield listener
        finally:
            os.chdir(here)


@pytest.mark.parametrize("document", of_each_release("wire/liveness.json"))
@pytest.mark.parametrize("answer", ["the server answers with one descriptor", "the server answers without an arena"])
def test_the_client_understands_a_recorded_answer(document: Any, answer: str, listener: socket.socket) -> None:
    token, received = raw(document["the client sends"]), []

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, open(os.devnull, "rb") as arena:
            received.append(peer.recv(64))
            socket.send_fds(peer, [raw(document[answer])], [arena.fileno()] if "one" in answer else [])

    thread = threading.Thread(target=serve)
    thread.start()
    link, fd = LivenessLink.connect("live", token, 5.0)
    thread.join(5)
    link.close()
    assert received == [token]
    assert (fd is not None) == ("one" in answer)
    if fd is not None:
        os.close(fd)


def test_this_release_writes_what_is_recorded() -> None:
    """A difference is either a mistake or a decision: `python -m tests.core.golden.record` records it, but not over
    what a release that is out has written."""
    release = recording.this_release()
    assert release in RECORDED, f"nothing is recorded of {release}"
    today = recording.current()
    assert today.keys() == RECORDED[release].keys()
    for name, document in today.items():
        assert document == RECORDED[release][name], name


def test_what_a_release_wrote_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "FOLDER", tmp_path)
    documents = recording.current()
    recording.write("9.0", documents)
    recording.write("9.0", {"names.json": {}})
    assert recording.recorded("9.0") == {"names.json": {}}
    recording.write("9.0", documents)
    (tmp_path / "9.0" / recording.RELEASED).touch()
    recording.write("9.0", documents)
    with pytest.raises(PermissionError):
        recording.write("9.0", {"names.json": {}})
    assert recording.recorded("9.0") == documents


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_a_sample_with_every_field_has_no_default(name: str) -> None:
    for struct in (REQUESTS[name].payload, REQUESTS[name].response):
        full = every_field(struct)
        for field in struct.__struct_fields__:
            assert getattr(full, field) != getattr(_defaults(struct), field, None)
        assert required_fields(struct) is not None


def _defaults(struct: type[Message]) -> object:
    required = required_fields(struct)
    names = struct.__struct_fields__
    optional = names[len(names) - len(struct.__struct_defaults__) :]
    return type("Defaults", (), {name: getattr(required, name) for name in optional})()


def test_an_unknown_code_of_a_newer_peer_keeps_its_text() -> None:
    error = error_from(ErrorPayload("tomorrow.new", "what is wrong", hint="what to do"))
    assert isinstance(error, RemoteError)
    assert isinstance(error, KVFrameworkError)
    assert "what is wrong (tomorrow.new)" in str(error)
    assert error.hint == "what to do"
