"""`kvframework clear` against a real server with real tiers: what leaves L1 and L2, what stays, and the question."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from kvframework.wire import messages as m
from tests.core.cli.command import run
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for

TOKENS = list(range(1024))
CHUNKS = 4
OTHER = {"model_name": "other", "hidden_dim_size": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "l2"


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess("l2.0.use=filesystem", f"l2.0.path={folder}") as process:
        yield process


def fill(server: ServerProcess) -> dict[str, m.Registered]:
    with server.client() as client:
        one, two = client.register(), client.register(2, **OTHER)
        client.store(key_for(one, TOKENS), b"a")
        client.store(key_for(two, TOKENS, model_name="other"), b"b", 2)
        wait_until(lambda: not any(tier["write_pending"] for tier in client.status()["l2"]), what="the writes to L2")
    return {"tiny": one, "other": two}


def clear(server: ServerProcess, *arguments: str) -> dict[str, object]:
    done = run("clear", "--yes", "--json", "--endpoint", server.endpoint, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


def hits(server: ServerProcess, models: dict[str, m.Registered]) -> dict[str, int]:
    with server.client() as client:
        client.register()
        client.register(2, **OTHER)
        return {
            model: client.hit(key_for(registered, TOKENS, model_name=model)) for model, registered in models.items()
        }


def test_l1_alone_comes_back_from_l2(server: ServerProcess) -> None:
    models = fill(server)
    cleared = clear(server)
    assert (cleared["objects"], cleared["in_use"], cleared["l2_objects"]) == (2 * CHUNKS, 0, 0)
    assert cleared["nbytes"] > 0
    assert hits(server, models) == {"tiny": len(TOKENS), "other": len(TOKENS)}


def test_a_model_leaves_the_other_in_both(server: ServerProcess) -> None:
    models = fill(server)
    cleared = clear(server, "--l2", "--model", "tiny")
    assert (cleared["objects"], cleared["l2_objects"], cleared["unlisted"]) == (CHUNKS, CHUNKS, [])
    assert cleared["l2_bytes"] > 0
    assert hits(server, models) == {"tiny": 0, "other": len(TOKENS)}


def test_a_model_that_only_l2_knows(server: ServerProcess) -> None:
    """After a restart the server has it from the record in the folder."""
    models = fill(server)
    server.kill9()
    server.start()
    cleared = clear(server, "--l2", "--model", "tiny")
    assert (cleared["objects"], cleared["l2_objects"]) == (0, CHUNKS)
    assert hits(server, models) == {"tiny": 0, "other": len(TOKENS)}
    assert clear(server, "--l2")["l2_objects"] == CHUNKS
    assert hits(server, models) == {"tiny": 0, "other": 0}


def test_what_is_in_use_stays(server: ServerProcess) -> None:
    models = fill(server)
    with server.client() as client:
        client.register()
        reply = client.lookup(key_for(models["tiny"], TOKENS))
        assert reply.hit_tokens == len(TOKENS)
        cleared = clear(server, "--l2")
        assert (cleared["objects"], cleared["in_use"]) == (CHUNKS, CHUNKS)
        found = client.retrieve(key_for(models["tiny"], TOKENS))
        assert found == b"a" * len(found or b"")


def test_an_unknown_model_is_named_with_the_near_one(server: ServerProcess) -> None:
    fill(server)
    done = run("clear", "--yes", "--endpoint", server.endpoint, "--model", "tny")
    assert done.returncode == 2
    assert "the model 'tny' is unknown to this server" in done.stderr
    assert "did you mean 'tiny'?" in done.stderr
    assert "expected: other, tiny" in done.stderr


def test_it_asks_first(server: ServerProcess) -> None:
    models = fill(server)
    with mock.patch("sys.stdin", io.StringIO("n\n")):
        refused = run("clear", "--l2", "--endpoint", server.endpoint)
    assert (refused.returncode, refused.stdout.strip()) == (1, "")
    # Of a terminal's prompt, the space behind it is not everywhere in a pipe.
    assert re.search(r"\? \[y/N\]: ?nothing was deleted\n$", refused.stderr)
    assert f"Drop all {2 * CHUNKS} objects, " in refused.stderr
    assert f" of L1 and of filesystem at {server.endpoint}?" in refused.stderr
    assert hits(server, models) == {"tiny": len(TOKENS), "other": len(TOKENS)}
    with mock.patch("sys.stdin", io.StringIO("y\n")):
        done = run("clear", "--l2", "--endpoint", server.endpoint)
    assert done.returncode == 0
    first, second = done.stdout.strip().splitlines()
    assert first.startswith(f"L1: deleted {2 * CHUNKS} objects, ")
    assert first.endswith("; kept 0 objects that are in use")
    assert second.startswith(f"L2: deleted {2 * CHUNKS} values, ")


def test_no_answer_is_no(server: ServerProcess) -> None:
    models = fill(server)
    with mock.patch("sys.stdin", io.StringIO("")):
        ended = run("clear", "--json", "--endpoint", server.endpoint)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "--yes" in ended.stderr
    with mock.patch("sys.stdin.readline", side_effect=KeyboardInterrupt):
        interrupted = run("clear", "--endpoint", server.endpoint)
    assert (interrupted.returncode, interrupted.stdout) == (130, "")
    assert hits(server, models) == {"tiny": len(TOKENS), "other": len(TOKENS)}


def test_a_dead_tier_is_named_with_what_was_cleared(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    tiers = [
        f"l2.{index}.{key}" for index, folder in enumerate(folders) for key in ("use=filesystem", f"path={folder}")
    ]
    with ServerProcess(*tiers) as server:
        fill(server)
        for folder in folders[:2]:
            shutil.rmtree(folder)
            folder.touch()
        arguments = ("clear", "--yes", "--l2", "--endpoint", server.endpoint)
        known = run(*arguments, "--model", "tiny")
        assert known.returncode == 2
        assert "nothing is cleared" in known.stderr
        with server.client() as client:
            assert client.status()["l1"]["objects"] == 2 * CHUNKS
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert [f"[[l2]] #{number}" in done.stderr for number in (1, 2, 3)] == [True, True, False]
        assert "L1 and the other tiers are cleared" in done.stderr
        with server.client() as client:
            assert client.status()["l1"]["objects"] == 0
        records = 2
        assert len([path for path in folders[2].glob("*/*") if path.is_file()]) == records


@pytest.mark.redis
def test_redis_loses_all_of_this_prefix_and_nothing_else(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path) as redis,
        redis.client() as store,
        ServerProcess("l2.0.use=redis", f"l2.0.url={redis.url}") as server,
    ):
        store.set("kvf:of somebody else", b"stays")
        store.set(b"foreign:" + bytes(72), b"stays")
        models = fill(server)
        server.kill9()
        server.start()
        cleared = clear(server, "--l2", "--model", "other")
        assert (cleared["objects"], cleared["l2_objects"], cleared["unlisted"]) == (0, CHUNKS, [])
        assert hits(server, models) == {"tiny": len(TOKENS), "other": 0}
        server.kill9()
        server.start()
        assert clear(server, "--l2")["l2_objects"] == CHUNKS
        assert hits(server, models) == {"tiny": 0, "other": 0}
        assert {store.get("kvf:of somebody else"), store.get(b"foreign:" + bytes(72))} == {b"stays"}
