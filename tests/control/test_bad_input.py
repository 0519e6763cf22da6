"""Bad input at the door that a server opens: bodies, texts, files of the state; and its process that ends, or cannot
start. The server and its engines go on."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvf_control.orders import MOST_PIN_S, MOST_PINS
from kvf_control.state import FORMAT
from tests.control.control_process import CHUNK, TOKEN, ControlAt, Engine, prompt
from tests.control.test_door import door_of, served
from tests.support.observe_process import SLOW_S
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

SECOND = 4_000_000_000.0  # a time of the next century's half
LOST = "pins and conversations of before are lost"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ControlAt]]:
    """A server, and its door, where texts of the model `tiny` are known; one prompt is stored."""
    folder = tmp_path_factory.mktemp("door")
    words = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(folder / "tokenizer.json"))
    files = '{"tiny"="%s"}' % (folder / "tokenizer.json")
    with served(folder, f"control.tokenizers={files}") as (server, _), Engine(server) as engine:
        engine.save(prompt(1, 4))
        yield server, door_of(server)


def raw(control: ControlAt, *parts: bytes) -> bytes:
    """Send bytes as they are; return the head of the answer, b"" for none. A door that closes early is no error."""
    place = urlsplit(control.url)
    head = b"host: localhost\r\nauthorization: Bearer " + TOKEN.encode() + b"\r\n"
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=SLOW_S) as connection:
        try:
            for part in parts:
                connection.sendall(part.replace(b"HEAD\r\n", head))
        except OSError:
            pass
        try:
            return connection.recv(4096).partition(b"\r\n")[0]
        except ConnectionError:
            return b""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[]", "Expected `object`"),
        (b"null", "Expected `object`"),
        (b'{"tokens": [true], "seconds": 60}', "Expected `int`, got `bool`"),
        (b'{"tokens": [1.5], "seconds": 60}', "Expected `int`, got `float`"),
        (b'{"tokens": ["1"], "seconds": 60}', "Expected `int`, got `str`"),
        (b'{"tokens": {"0": 1}, "seconds": 60}', "Expected `array`"),
        (b'{"tokens": [1], "seconds": 1e999}', "out of range"),
        (b'{"tokens": [1], "seconds": "60"}', "Expected `float`, got `str`"),
        (b'{"tokens": [1], "seconds": 60, "l1": true}', "unknown field `l1`"),
        (b'{"tokens": [1], "seconds": 60, "tokens": 2}', "Expected `array`"),
        (b'{"tokens": [1], "seconds": 60, "tenant": null}', "Expected `str`"),
        (b'{"digests": "00", "seconds": 60}', "Expected `array`"),
        (b'{"text": 7, "seconds": 60}', "Expected `str`"),
        (b'{"text": "\\ud800", "model": "tiny", "seconds": 60}', "surrogate"),
        (b'{"text": "\xff", "model": "tiny", "seconds": 60}', "can't decode byte"),
        (b'{"tokens": [1], "seconds": 60} {}', "trailing characters"),
        (b'{"salt": "' + b"x" * 1025 + b'", "tokens": [1], "seconds": 60}', "length <= 1024"),
        (b'{"tokens": [' + b"1," * (1 << 18) + b'1], "seconds": 60}', "length <= 262144"),
        # A text within the limit of its length, and beyond that of its tokens.
        (b'{"text": "' + b"? " * ((1 << 18) + 1) + b'", "model": "tiny", "seconds": 60}', "has 262145 tokens"),
        (b'{"text": "' + b"x" * ((1 << 20) + 1) + b'", "model": "tiny", "seconds": 60}', "length <= 1048576"),
        (b'{"x": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b', "seconds": 60}', "unknown field `x`"),
    ],
)
def test_a_bad_body_is_named(opened: tuple[ServerProcess, ControlAt], body: bytes, words: str) -> None:
    _, control = opened
    status, answer = control.ask("POST", "/v1/pin", body)
    assert (status, words in answer["error"]) == (400, True), answer
    assert len(answer["error"]) <= 300


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ((b"POST /v1/pin HTTP/1.1\r\nHEAD\r\ncontent-length: 3145729\r\n\r\n",), b"413"),
        ((b"POST /v1/pin HTTP/1.1\r\nHEAD\r\ncontent-length: 99999999999999999999\r\n\r\n",), b"4"),
        ((b"POST /v1/pin HTTP/1.1\r\nHEAD\r\ncontent-length: -1\r\n\r\n",), b"400"),
        ((b"POST /v1/pin HTTP/1.1\r\nHEAD\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",), b"400"),
        (
            (
                b"POST /v1/pin HTTP/1.1\r\nHEAD\r\ntransfer-encoding: chunked\r\n\r\n",
                *[b"10000\r\n" + b" " * 0x10000 + b"\r\n"] * 49,
            ),
            b"413",
        ),
        ((b"POST /v1/pin HTTP/1.1\r\nHEAD\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",), b"4"),
        ((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",), b"400"),
    ],
    ids=["large", "huge", "negative", "two lengths", "chunked", "long head", "tls"],
)
def test_a_body_that_is_too_large_or_none_is_refused(
    opened: tuple[ServerProcess, ControlAt], parts: Sequence[bytes], status: bytes
) -> None:
    _, control = opened
    answer = raw(control, *parts)
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert control.ask("GET", "/livez") == (200, "ok\n")


def test_after_all_of_it_orders_are_carried_out(opened: tuple[ServerProcess, ControlAt]) -> None:
    server, control = opened
    told = control.order("/v1/pin", tokens=prompt(1, 4), seconds=60)
    assert (told["state"], told["l1_tokens"]) == ("held", 4 * CHUNK)
    log = server.log_file.read_text()
    assert "Traceback" not in log, log
    assert log.count("orders: http") == 1


def state(pins: object = (), conversations: object = (), number: object = FORMAT) -> bytes:
    return msgspec.msgpack.encode([number, pins, conversations])


def run(**other: object) -> list[object]:
    """One of a file, which is right but for `other`."""
    fields = {"namespace": "0" * 32, "model": "tiny", "chunk_tokens": CHUNK, "world_size": 1}
    fields |= {"salt": "", "nbytes": 1, "digests": b"d" * 32} | other
    *place, salt, nbytes, digests = fields.values()
    return [place, salt, nbytes, digests]


def pin(*runs: object, name: object = "1-1", until: object = SECOND) -> list[object]:
    return [name, "", "", 1.0, until, list(runs)]


@pytest.mark.parametrize(
    "content",
    [
        state(number=FORMAT + 1),
        state(number="1"),
        state([pin(run())])[:-1],
        state([pin(run(namespace="zz"))]),
        state([pin(run(namespace="0" * 31))]),
        state([pin(run(chunk_tokens=0))]),
        state([pin(run(chunk_tokens=-256))]),
        state([pin(run(world_size=0))]),
        state([pin(run(world_size=1 << 40))]),
        state([pin(run(digests=b"d" * 31))]),
        state([pin(run(digests=b""))]),
        state([pin(run(nbytes=-1))]),
        state([pin(run(salt=7))]),
        state([pin(run(), until=float("nan"))]),
        state([pin(run(), until="tomorrow")]),
        state([pin(run(), name=str(number)) for number in range(MOST_PINS + 1)]),
        state([], [["", "agent", [run(namespace="zz")]]]),
        state({"pins": 1}),
    ],
)
def test_a_file_of_the_state_that_no_process_wrote_is_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").touch(0o600)
    (tmp_path / "state").write_bytes(content)
    with served(tmp_path) as (server, _), Engine(server) as engine:
        engine.save(prompt(1, 1))
        control = door_of(server)
        wait_until(lambda: LOST in server.log_file.read_text(), SLOW_S, "the log")
        assert control.listed() == []
        # The thread that follows orders goes on.
        told = control.order("/v1/pin", tokens=prompt(1, 1), seconds=0.5)
        wait_until(lambda: control.directive(told["id"])["state"] == "ended", SLOW_S, "the pin's end")
        log = server.log_file.read_text()
        assert ("Traceback" in log, log.count("orders: http")) == (False, 1), log


def test_a_pin_of_a_namespace_that_no_engine_has_any_more_waits_or_ends(tmp_path: Path) -> None:
    (tmp_path / "state").touch(0o600)
    (tmp_path / "state").write_bytes(state([pin(run(), until=float("inf"))], [["", "agent", [run()]]]))
    with served(tmp_path) as (server, _), Engine(server) as engine:
        engine.save(prompt(1, 1))
        control = door_of(server)
        wait_until(lambda: "1 pins and 1 conversations go on" in server.log_file.read_text(), SLOW_S, "the log")
        [told] = control.listed()
        assert (told["id"], told["l1_tokens"]) == ("1-1", 0)
        assert told["until"] <= time.time() + MOST_PIN_S
        assert control.order("/v1/pin", tokens=prompt(1, 1), seconds=60)["state"] == "held"
        assert "Traceback" not in server.log_file.read_text()


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "no folder"])
def test_a_file_of_the_state_that_is_none(tmp_path: Path, kind: str) -> None:
    """Nothing waits for it, nothing is written through a link, and the orders go on."""
    place, victim = tmp_path / "state", tmp_path / "victim"
    victim.write_text("of others")
    {
        "folder": place.mkdir,
        "fifo": lambda: os.mkfifo(place, 0o600),
        "link": lambda: place.symlink_to(victim),
        "no folder": lambda: None,
    }[kind]()
    settings = (f"control.state_file={tmp_path / 'nowhere' / 'state'}",) if kind == "no folder" else ()
    with served(tmp_path, *settings) as (server, _), Engine(server) as engine:
        engine.save(prompt(1, 1))
        control = door_of(server)
        assert control.order("/v1/pin", tokens=prompt(1, 1), seconds=60)["state"] == "held"
        if kind in ("folder", "no folder"):
            words = "would not outlast this process"
            wait_until(lambda: words in server.log_file.read_text(), SLOW_S, "the log")
            assert server.log_file.read_text().count(words) == 1
    assert victim.read_text() == "of others"


def part(engine: Engine) -> dict[str, Any]:
    found = engine.status()["listeners"]["control"]
    assert isinstance(found, dict)
    return found


def test_the_process_is_killed_again_and_again_and_engines_notice_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as (server, _), Engine(server) as engine:
        engine.save(prompt(1, 2))
        told = door_of(server).order("/v1/pin", tokens=prompt(1, 2), seconds=3600)
        wait_until((tmp_path / "state").exists, SLOW_S, "the file")
        for number in range(2, 5):
            before = part(engine)["pid"]
            os.kill(before, 9)
            engine.save(prompt(number, 1))
            assert engine.l1_tokens(prompt(number, 1)) == CHUNK
            control = door_of(server, number)
            wait_until(lambda: [each["state"] for each in control.listed()] == ["held"], SLOW_S, "the pin")  # noqa: B023
            assert control.listed()[0]["id"] == told["id"]
            assert part(engine)["starts"] == number
            assert part(engine)["pid"] != before


def test_a_process_that_cannot_start_again_is_told_in_the_status_until_it_can(tmp_path: Path) -> None:
    with served(tmp_path) as (server, _), Engine(server) as engine:
        door_of(server)
        (tmp_path / "token").unlink()
        os.kill(part(engine)["pid"], 9)
        wait_until(lambda: "cannot be read" in server.log_file.read_text(), SLOW_S, "the process's error")
        wait_until(lambda: "status 1" in part(engine)["problem"], SLOW_S, "the problem")
        engine.save(prompt(1, 1))
        assert engine.l1_tokens(prompt(1, 1)) == CHUNK
        (tmp_path / "token").write_text(TOKEN)
        assert door_of(server, 2).order("/v1/pin", tokens=prompt(1, 1), seconds=60)["state"] == "held"


def test_a_client_that_goes_while_its_order_is_carried_out(opened: tuple[ServerProcess, ControlAt]) -> None:
    server, control = opened
    place = urlsplit(control.url)
    body = msgspec.json.encode({"tokens": prompt(1, 4), "seconds": 60})
    head = f"POST /v1/pin HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
    for _ in range(20):
        with closing(socket.create_connection((place.hostname or "", place.port or 0), timeout=SLOW_S)) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    assert control.order("/v1/pin", tokens=prompt(1, 4), seconds=60)["state"] == "held"
    assert "Traceback" not in server.log_file.read_text()
