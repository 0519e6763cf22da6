"""Servers of different settings that share a tier, a setting that changes at a restart, and a rank that dies: a miss at
most, never another's bytes."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvframework.errors import VersionMismatch
from tests.core.shards.dying_rank import MODEL, TP
from tests.core.shards.model import CHUNK, TOKENS, SplitEngine
from tests.core.tiers.nodes import await_written
from tests.support.lazy import torch
from tests.support.processes import ran
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch

PROMPT = list(range(TOKENS))
SHARDS = 4


def serving(*settings: str) -> ServerProcess:
    return ServerProcess(f"server.chunk_size={CHUNK}", *settings)


def test_servers_with_and_without_the_setting_share_a_tier(tmp_path: Path) -> None:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path}", "l2.0.shared=true", "l2.0.timeout_s=20")
    settings = {"shards": f"server.tp_lcm={SHARDS}", "ranks": "server.tp_lcm=1"}
    contents = {"shards": MODEL.content(1), "ranks": MODEL.content(2)}
    for name, setting in settings.items():
        with serving(*tier, setting) as server, server.engine_client() as client:
            with SplitEngine(client, 1, MODEL, TP, content=contents[name]) as engine:
                assert engine.hit(PROMPT) == 0
                # Ranks of the other kind have the same numbers, and objects of the same bytes.
                assert engine.store(PROMPT) == [TOKENS // CHUNK * (SHARDS // TP if name == "shards" else 1)] * TP
            with server.client() as watcher:
                await_written(watcher)
    # Servers that begin with what the tier holds. 8 is another setting with as many shards of four heads.
    for name, setting, sizes in (
        ("shards", settings["shards"], (1, 2, 4)),
        ("ranks", settings["ranks"], (2,)),
        ("shards", "server.tp_lcm=8", (8,)),
    ):
        with serving(*tier, setting) as server, server.engine_client() as client:
            for number, tp in enumerate(sizes):
                with SplitEngine(client, 10 * (number + 1), MODEL, tp) as engine:
                    found = engine.scheduler.wait(engine.scheduler.lookup(engine.request(PROMPT)), 60)
                    assert found.hit_tokens == TOKENS, (name, tp)
                    assert all(engine.load(PROMPT))
                    engine.expect(contents[name])
                    engine.scheduler.free(found)


def test_a_setting_that_changes_at_a_restart_is_refused_by_engines_of_before(caplog: pytest.LogCaptureFixture) -> None:
    whole, other = MODEL.content(1), MODEL.content(2)
    with ExitStack() as stack:
        server = stack.enter_context(serving("server.tp_lcm=4"))
        client = stack.enter_context(server.engine_client())
        engine = stack.enter_context(SplitEngine(client, 1, MODEL, TP, content=whole))
        assert engine.store(PROMPT) == [4, 4]
        server.set("server.tp_lcm=2")
        assert server.take_over() == 0
        assert server.status()["l1"]["objects"] == 8, "kept"
        # What it asks for and what its ranks load would have different names.
        wait_until(lambda: "has tp_lcm 2" in caplog.text, 60, "the refusal")
        assert not client.usable
        assert engine.hit(PROMPT) == 0
        assert engine.load(PROMPT) == [False, False]
        with pytest.raises(VersionMismatch, match="tp_lcm 2"):
            client.raise_down()
        with server.engine_client() as anew, SplitEngine(anew, 11, MODEL, TP, content=other) as later:
            assert later.hit(PROMPT) == 0, "another name"
            assert later.store(PROMPT) == [2, 2]
        server.set("server.tp_lcm=4")
        assert server.take_over() == 0
        assert client.wait_up(60)
        with SplitEngine(client, 21, MODEL, 1) as loading:
            assert loading.hit(PROMPT) == TOKENS
            assert loading.load(PROMPT) == [True]
            loading.expect(whole)
        assert engine.hit(PROMPT) == TOKENS


def test_a_rank_that_dies_within_a_store_leaves_no_half_of_a_chunk() -> None:
    whole = MODEL.content(1)
    with serving("server.tp_lcm=4") as server, server.engine_client() as client:
        command = [sys.executable, "-m", "tests.core.shards.dying_rank", server.endpoint]
        died = ran(*command, "1", code=None, timeout=120)
        assert died.returncode == -signal.SIGKILL, died.stderr
        wait_until(lambda: not server.status()["instances"], 60, "the end of the rank")
        with SplitEngine(client, 11, MODEL, TP, content=whole) as engine:
            ranks = engine.ranks
            engine.ranks = ranks[:1]
            assert engine.store(PROMPT) == [4]
            engine.ranks = ranks
            with SplitEngine(client, 21, MODEL, 4) as other:
                # All of the first chunk, and of the second one what the other rank stored.
                assert other.hit(PROMPT) == CHUNK
                assert other.load(PROMPT) == [True, True, False, False]
                found = [rank.content().flatten(2, 3)[:, :, :TOKENS] for rank in other.ranks]
                assert not any(each.any() for each in found[2:])
                assert all(
                    torch.equal(each, rank.part_of(whole).flatten(2, 3)[:, :, :TOKENS])
                    for each, rank in zip(found[:2], other.ranks[:2], strict=True)
                )
            assert engine.store(PROMPT) == [0, 2], "only what is not there"
            with SplitEngine(client, 31, MODEL, 1) as other:
                assert other.hit(PROMPT) == TOKENS
                assert other.load(PROMPT) == [True]
                other.expect(whole)
