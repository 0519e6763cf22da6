"""`kvframework hold` with a stand-in for its server: real processes."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import random
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.core.keeper.held import HELD_UP, TIMEOUT, Held
from tests.core.keeper.stand_in import token_of
from tests.support.processes import descriptors, has_ended
from tests.support.server_process import fixture_of
from tests.support.waiting import wait_until

KILLS = 50
SEED = int(os.environ.get("KVFRAMEWORK_TEST_SEED", random.SystemRandom().randrange(1 << 32)))


held = fixture_of(Held)


def test_a_killed_server_finds_what_it_stored_and_its_children_inherit_nothing(held: Held) -> None:
    first = held.ready(1)
    assert first["found"] == {}
    os.kill(first["pid"], signal.SIGKILL)
    second = held.ready(2)
    assert set(second["found"]) == {"kvf-arena", "kvf-journal"}
    (token,) = set(second["found"].values())
    assert "broken" not in token
    assert first["environ"] == second["environ"] == []
    assert f"process {first['pid']}, ended by signal SIGKILL; the next start is in 0.0 s" in held.log


def test_what_is_stored_survives_kills_at_random_moments(held: Held) -> None:
    chance = random.Random(SEED)
    token = ""
    for number in range(1, KILLS + 1):
        ready = held.ready(number)
        tokens = set(ready["found"].values())
        if number > 1:
            assert len(ready["found"]) == 2, f"seed {SEED}"
            assert tokens == {token or next(iter(tokens))}, f"seed {SEED}"
            (token,) = tokens
        os.kill(ready["pid"], signal.SIGKILL)
        # Sometimes the next one as well, wherever its start has come.
        if chance.random() < 0.2:
            wait_until(lambda old=ready["pid"]: held.servers() - {old}, TIMEOUT, "the next server")
            for pid in held.servers() - {ready["pid"]}:
                os.kill(pid, signal.SIGKILL)
    assert len(held.ask("status")["held"]) == 2


def test_a_signal_ends_the_server_and_then_the_keeper(held: Held) -> None:
    server = held.ready(1)["pid"]
    held.process.send_signal(signal.SIGTERM)
    assert held.process.wait(TIMEOUT) == 0
    assert has_ended(server)
    assert held.reports()[-1]["event"] == "SIGTERM"
    assert sorted(file.name for file in held.folder.iterdir() if file.name.startswith("s.sock")) == ["s.sock.hold.lock"]


def test_a_server_that_ignores_its_end_is_killed(held: Held) -> None:
    held.fail("ignores its end")
    os.kill(held.ready(1)["pid"], signal.SIGKILL)
    server = held.ready(2)["pid"]
    held.process.send_signal(signal.SIGINT)
    assert held.process.wait(TIMEOUT) == 128 + signal.SIGKILL
    assert has_ended(server)


def test_a_server_that_gets_ready_at_its_end_and_ignores_it_is_killed(held: Held) -> None:
    first = held.ready(1)["pid"]
    held.fail("is ready after its end begins")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: held.reports()[-1]["event"] == "waits", TIMEOUT, "the next server")
    server = held.reports()[-1]["pid"]
    held.process.send_signal(signal.SIGTERM)
    held.ready(2)
    assert held.process.wait(TIMEOUT) == 128 + signal.SIGKILL
    assert has_ended(server)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_passes_on_to_the_server(held: Held, number: signal.Signals) -> None:
    held.ready(1)
    held.process.send_signal(number)
    wait_until(lambda: held.reports()[-1]["event"] == number.name, TIMEOUT, "the signal")


def test_a_terminal_that_closes_ends_both() -> None:
    ours, theirs = os.openpty()
    with Held(stderr=theirs) as held:
        os.close(theirs)
        server = held.ready(1)["pid"]
        os.close(ours)
        held.process.send_signal(signal.SIGHUP)
        held.process.wait(TIMEOUT)
        assert has_ended(server)


def test_a_server_that_fails_at_start_starts_again_later_and_later(held: Held) -> None:
    held.ready(1)
    held.fail("at start")
    os.kill(held.ready(1)["pid"], signal.SIGKILL)
    held.says("with status 3; the next start is in 0.4 s")
    assert len(held.ask("status")["held"]) == 2
    held.fail("")
    assert len(held.ready(2)["found"]) == 2


def test_a_refused_start_ends_the_keeper_that_keeps_nothing(held: Held) -> None:
    server = held.ready(1)["pid"]
    held.ask("drop", restart=True)
    held.ready(2)
    held.fail("refused")
    os.kill(held.ready(2)["pid"], signal.SIGKILL)
    held.says("with status 2; the next start")
    assert held.process.poll() is None
    assert held.ask("drop")["done"]
    assert held.process.wait(TIMEOUT) == 2
    assert server != held.ready(2)["pid"]


@pytest.fixture
def arena(held: Held) -> Iterator[int]:
    """The kept arena, opened as nobody else has it."""
    held.first_is_heard()
    (number,) = [fd for fd, target in descriptors(held.process.pid).items() if "kvf-arena" in target]
    opened = os.open(f"/proc/{held.process.pid}/fd/{number}", os.O_RDWR)
    yield opened
    os.close(opened)


def test_drop_frees_also_what_an_engine_still_maps(held: Held, arena: int) -> None:
    with mmap.mmap(arena, 0) as mapped:
        assert held.ask("drop", restart=True)["freed"] == 2 << 20
        assert os.fstat(arena).st_blocks == 0
        assert mapped[0] == 0


def test_drop_frees_nothing_that_another_server_uses(held: Held, arena: int) -> None:
    """One that took over by hand."""
    fcntl.flock(arena, fcntl.LOCK_EX)
    reply = held.ask("drop", restart=True)
    assert (reply["done"], reply["freed"]) == (True, 0)
    assert "another process still uses" in reply["text"]
    assert token_of("kvf-arena", arena).isalnum()
    assert held.ready(2)["found"] == {}


def test_log_lines_can_be_json() -> None:
    with Held("json") as held:
        held.ready(1)
        entry = json.loads(held.log.splitlines()[0])
    assert set(entry) == {"time", "level", "logger", "message"}
    assert entry["message"].startswith("the server is process ")


class TestReload:
    def test_the_new_server_takes_over_with_what_is_kept(self, held: Held) -> None:
        old = held.ready(1)["pid"]
        reply = held.ask("reload")
        new = held.ready(2)
        assert reply == {"done": True, "text": f"process {new['pid']} has taken over"}
        assert new["takeover"]
        assert len(new["found"]) == 2
        wait_until(lambda: has_ended(old), TIMEOUT, "the end of the old server")
        wait_until(lambda: held.servers() == {new["pid"]}, TIMEOUT, "the keeper to see that end")

    def test_a_server_that_is_ready_just_after_the_end_of_the_old_one_takes_over(self) -> None:
        with Held(keeper=HELD_UP) as held:
            held.ready(1)
            reply = held.ask("reload")
            new = held.ready(2)
            assert reply == {"done": True, "text": f"process {new['pid']} has taken over"}
            assert len(held.ask("status")["held"]) == 2

    def test_a_server_that_is_not_ready_is_not_replaced(self, held: Held) -> None:
        """Both would make an arena, and the keeper would have that of the wrong one."""
        held.ready(1)
        held.fail("starts slowly")
        os.kill(held.ready(1)["pid"], signal.SIGKILL)
        wait_until(lambda: held.ask("status")["starts"] == 2, TIMEOUT, "the next start")
        reply = held.ask("reload")
        assert not reply["done"]
        assert ", is not ready yet" in reply["text"]
        assert held.ask("status")["starts"] == 2

    def test_a_new_server_that_fails_first_leaves_the_old_one(self, held: Held) -> None:
        old = held.ready(1)["pid"]
        held.fail("before the hand-over")
        reply = held.ask("reload")
        assert not reply["done"]
        assert "before it was ready: the old server keeps running" in reply["text"]
        assert held.servers() == {old}
        assert held.ask("status")["server"]["pid"] == old

    def test_a_new_server_that_fails_later_starts_again(self, held: Held) -> None:
        held.ready(1)
        held.fail("after the hand-over")
        assert not held.ask("reload")["done"]
        second = held.ready(2)
        assert not second["takeover"]
        assert len(second["found"]) == 2

    def test_a_signal_ends_both(self, held: Held) -> None:
        held.ready(1)
        held.fail("hangs")

        replies: list[object] = []
        asked = threading.Thread(target=lambda: replies.append(held.ask("reload")))
        asked.start()
        wait_until(lambda: len(held.servers()) == 2, TIMEOUT, "two servers")
        servers = held.servers()
        held.process.send_signal(signal.SIGTERM)
        held.process.wait(TIMEOUT)
        assert all(has_ended(pid) for pid in servers)
        asked.join(TIMEOUT)
        assert replies == [{"done": False, "text": "the keeper is ending"}]
