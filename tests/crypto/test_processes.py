"""Sealed values of real servers on a real folder, and the commands that change their keys meanwhile."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvf_crypto.sealing import Head
from kvframework.storage.namespaces import RECORD_BYTES
from tests.core.cli.command import run
from tests.core.tiers.engine import Engine
from tests.core.tiers.nodes import await_written, count
from tests.core.tiers.prompts import prompt
from tests.crypto.keyrings import Keyrings
from tests.filesystem.test_disk import settings, values_in
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

PROMPT = prompt(range(1, 9))


def crypto(keyrings: Keyrings, *arguments: str) -> None:
    done = run("crypto", *arguments, "--config", str(keyrings.config))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def keyrings(tmp_path: Path) -> Keyrings:
    made = Keyrings(tmp_path)
    crypto(made, "rotate")
    return made


def server_of(keyrings: Keyrings, folder: Path) -> ServerProcess:
    keyring = f"codecs.aead.keyring={keyrings.options['keyring']}"
    return ServerProcess(*settings(folder, codec="aead", shared="true"), keyring)


def generations(folder: Path) -> set[int]:
    """The generations that seal the objects of a folder. Its other value, which no load rewrites, is the namespace's
    record: the server renews it. All values must be sealed."""
    heads = {path: path.read_bytes().index(b"KVA1") for path in values_in(folder)}
    objects = [path for path in heads if path.stat().st_size > 2 * RECORD_BYTES]
    return {Head.of(memoryview(path.read_bytes())[heads[path] :]).generation for path in objects}


def test_a_rotation_beside_a_server_loses_nothing_and_ends_with_the_new_key(keyrings: Keyrings, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    fresh = prompt(range(100, 104))
    with server_of(keyrings, folder) as server:
        with Engine(server.endpoint) as engine:
            engine.store(PROMPT)
            await_written(engine.client)
            assert generations(folder) == {1}
            crypto(keyrings, "rotate")
            engine.store(fresh)
            await_written(engine.client)
            assert generations(folder) == {1, 2}, "new values have the new key"
            engine.clear()
            assert engine.load(PROMPT) == len(PROMPT), "the old key still opens"
            wait_until(lambda: generations(folder) == {2}, 60, "old values under the new key")
        crypto(keyrings, "rotate", "--drop-old")
        server.kill9()
        server.start()
        with Engine(server.endpoint) as engine:
            assert engine.load(PROMPT) == len(PROMPT)
            assert engine.load(fresh) == len(fresh)
            assert count(engine.client, "no_key") == count(engine.client, "forged") == 0


@pytest.mark.parametrize("mistake", ["missing", "another", "readable", "short"])
def test_a_server_does_not_start_with_a_wrong_key_and_names_the_file(
    keyrings: Keyrings, tmp_path: Path, mistake: str
) -> None:
    key = keyrings.folder / "keyring.key"
    if mistake == "missing":
        key.unlink()
    elif mistake == "another":
        key.write_text(os.urandom(32).hex())
    elif mistake == "readable":
        key.chmod(0o644)
    else:
        key.write_text("5a" * 31)
    server = server_of(keyrings, tmp_path / "kv")
    with ExitStack() as stack:
        stack.push(server)
        with pytest.raises(AssertionError):
            server.start()
        assert server.process is not None
        assert server.process.wait(60) != 0
        assert ("keyring" if mistake == "another" else str(key)) in server.log
        assert "Traceback" not in server.log
        assert not values_in(tmp_path / "kv")


def test_a_node_with_another_keyring_misses_and_harms_nothing(keyrings: Keyrings, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    (tmp_path / "other").mkdir()
    others = Keyrings(tmp_path / "other")
    crypto(others, "rotate")
    with server_of(keyrings, folder) as server, Engine(server.endpoint) as engine:
        engine.store(PROMPT)
        await_written(engine.client)
        with server_of(others, folder) as stranger, Engine(stranger.endpoint) as second:
            assert second.load(PROMPT) == 0
            assert count(second.client, "no_key") > 0
        engine.clear()
        assert engine.load(PROMPT) == len(PROMPT), "the values stay"


def test_a_changed_value_is_a_counted_miss(keyrings: Keyrings, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with server_of(keyrings, folder) as server, Engine(server.endpoint) as engine:
        engine.store(PROMPT)
        await_written(engine.client)
        for path in values_in(folder):
            value = bytearray(path.read_bytes())
            value[-1] ^= 1
            path.write_bytes(value)
        engine.clear()
        assert engine.load(PROMPT) == 0
        wait_until(lambda: count(engine.client, "corrupt") + count(engine.client, "forged") > 0, 60, "the count")
        engine.store(PROMPT)
        await_written(engine.client)
        engine.clear()
        assert engine.load(PROMPT) == len(PROMPT), "it is stored again"
