"""The table `[control]` of a server: its door, what outlasts it in a file, and orders that name a text."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvf_control.listener import ControlListener
from kvf_control.settings import ControlConfig
from kvf_dev.testing import ListenerConformance
from tests.control.control_process import CHUNK, TOKEN, ControlAt, Engine, prompt
from tests.core.cli.command import run
from tests.support.observe_process import SLOW_S, listening_url
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

L1_CHUNKS = 128  # of 4 MiB
SALT = "the salt of acme"


@contextmanager
def served(tmp_path: Path, *settings: str) -> Iterator[tuple[ServerProcess, Path]]:
    """A server with the table, and the file of its state."""
    (tmp_path / "token").write_text(TOKEN)
    state = tmp_path / "state"
    door = (
        "control.listen=127.0.0.1:0",
        f"control.token_file={tmp_path / 'token'}",
        f"control.state_file={state}",
        *settings,
    )
    with ServerProcess(*door, capacity="4MiB") as server:
        yield server, state


def door_of(server: ServerProcess, number: int = 1) -> ControlAt:
    """The door, once it has been opened so many times."""

    def opened() -> bool:
        return server.log_file.read_text().count("orders: http") >= number

    wait_until(opened, SLOW_S, "the door")
    return ControlAt(listening_url(server.log_file.read_text(), "orders") or "")


def test_the_server_opens_the_door_and_says_so_in_its_status(tmp_path: Path) -> None:
    with served(tmp_path) as (server, _), Engine(server) as engine:
        control = door_of(server)
        engine.save(prompt(1, 2))
        assert control.order("/v1/pin", tokens=prompt(1, 2), seconds=60)["state"] == "held"
        assert control.ask("POST", "/v1/pin", {}, token="another")[0] == 401
        part = engine.status()["listeners"]["control"]
        assert (part["listen"], part["starts"], part["problem"]) == ("127.0.0.1:0", 1, "")
        # A process that is killed comes again, and the pin with it.
        os.kill(part["pid"], 9)
        again = door_of(server, 2)
        wait_until(lambda: [each["state"] for each in again.listed()] == ["held"], SLOW_S, "the pin")
        assert TOKEN not in server.log_file.read_text()


def test_pins_and_conversations_outlast_a_takeover_of_their_server(tmp_path: Path) -> None:
    tokens = prompt(1, 8)
    with served(tmp_path) as (server, state):
        with Engine(server) as engine:
            engine.save(tokens, cache_salt=SALT)
            engine.save(prompt(2, 4))
            control = door_of(server)
            told = control.order("/v1/pin", tokens=tokens, salt=SALT, seconds=3600, tenant="acme")
            control.order("/v1/conversations/agent/turn", tokens=prompt(2, 4), seconds=60)
            ended = control.order("/v1/pin", tokens=prompt(2, 4), seconds=3600)
            assert control.ask("DELETE", f"/v1/directives/{ended['id']}")[0] == 200
        wait_until(state.exists, SLOW_S, "the file")
        assert stat.S_IMODE(state.stat().st_mode) == 0o600
        assert server.take_over() == 0
        control = door_of(server, 2)
        with Engine(server) as engine:
            wait_until(lambda: engine.status()["l1"]["pins"] == 8, SLOW_S, "the pin at the next server")
            engine.fill_up(2 * L1_CHUNKS)
            assert engine.l1_tokens(tokens, cache_salt=SALT) == len(tokens)
        [after] = control.listed()
        assert (after["id"], after["state"], after["tenant"]) == (told["id"], "held", "acme")
        assert after["until"] == pytest.approx(told["until"], abs=2)
        assert control.order("/v1/conversations/agent/end")["do"] == "end"


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"\x93\x63\x90\x90"])
def test_a_broken_file_of_the_state_is_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").touch(0o600)
    (tmp_path / "state").write_bytes(content)
    with served(tmp_path) as (server, _), Engine(server) as engine:
        engine.save(prompt(1, 1))
        control = door_of(server)
        wait_until(lambda: "pins and conversations of before are lost" in server.log_file.read_text(), what="the log")
        assert control.order("/v1/pin", tokens=prompt(1, 1), seconds=60)["state"] == "held"


def test_a_file_that_others_may_read_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "state").touch(0o644)
    (tmp_path / "state").chmod(0o644)
    with served(tmp_path) as (server, _):
        wait_until(lambda: "open to others" in server.log_file.read_text(), SLOW_S, "the log")


def test_a_text_is_tokenized(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"one": 1, "two": 2, "?": 0}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    files = json.dumps({"tiny": str(tmp_path / "tokenizer.json")}).replace(":", "=", 1)
    with served(tmp_path, f"control.tokenizers={files}") as (server, _), Engine(server) as engine:
        control = door_of(server)
        engine.save(prompt(1, 2))
        told = control.order("/v1/pin", text="one " * (2 * CHUNK), model="tiny", seconds=60)
        assert (told["asked_tokens"], told["l1_tokens"]) == (2 * CHUNK, 2 * CHUNK)
        bad = [
            ({"text": "one"}, "no tokenizer for a text of the model ''"),
            ({"text": "one", "model": "other"}, "no tokenizer"),
            ({"text": "one", "model": "tiny", "tokens": [1]}, "a text, and tokens or digests"),
            ({"text": "one", "model": "tiny"}, "no whole chunk"),
            ({"text": "one " * (1 << 19), "model": "tiny"}, "length <= 1048576"),
        ]
        for body, said in bad:
            status, answer = control.ask("POST", "/v1/prefetch", body)
            assert (status, said in answer["error"]) == (400, True), answer
        receipt = control.order("/v1/forget", text="one " * (2 * CHUNK), model="tiny")
        assert receipt["places"][0]["objects"] == 2


class TestControl(ListenerConformance):
    """The listener `control` of `kvf_control`; its process finds no server."""

    @pytest.fixture
    def make_listener(self, tmp_path: Path) -> object:
        (tmp_path / "token").write_text(TOKEN)
        options = ControlConfig(listen="127.0.0.1:0", token_file=str(tmp_path / "token"))
        return lambda context: ControlListener(options, context)


def test_a_table_without_a_token_is_refused_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "kvf.toml"
    file.write_text('[server]\nendpoint = "ipc:///tmp/kvf-none"\n[l1]\ncapacity = "4MiB"\n[control]\n')
    done = run("config", "check", str(file))
    assert (done.returncode, "no token is configured" in done.stderr + done.stdout) == (2, True), done
