"""What routers know across the ends of a server: stopped, killed, killed under a keeper."""

from __future__ import annotations

import array
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random

import zmq

from kvf_events.ledger import Ledger
from kvframework.wire import messages as m
from tests.events.node import OBJECT, Engine, beginnings, found, prompt, router, settings
from tests.events.test_announced import TellingServer
from tests.support.held_server import HeldServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

PROMPTS = [prompt(number, 3) for number in range(5)]


def store_all(server: ServerProcess) -> set[tuple[int, ...]]:
    with server.client() as client:
        engine = Engine(client)
        for tokens in PROMPTS:
            engine.store(tokens)
        return found(engine, PROMPTS)


def ledgers(server: ServerProcess) -> list[Path]:
    return [each for each in Path(server.endpoint.removeprefix("ipc://")).parent.iterdir() if "events-" in each.name]


def test_after_a_cold_start_what_is_gone_is_removed_and_the_numbers_go_on() -> None:
    for stop in (ServerProcess.stop, ServerProcess.kill9):
        with TellingServer() as server, router(server) as reader:
            held = store_all(server)
            reader.until(held)
            before = reader.next
            stop(server)
            server.start()
            reader.until(set())
            assert reader.next > before
            again = store_all(server)
            assert again == held
            reader.until(held)
            with router(server) as late:
                late.until(held)
            assert {stat.S_IMODE(each.stat().st_mode) for each in ledgers(server)} == {0o600}


def test_a_reader_that_was_away_for_two_lives_is_healed() -> None:
    with TellingServer() as server, router(server) as away:
        away.until(store_all(server))
        away.leave()
        for _ in range(2):
            server.stop()
            server.start()
            with server.client() as client:
                Engine(client).store(prompt(77, 1))
        away.join()
        away.until(beginnings(prompt(77, 1)))


class HeldTellingServer(HeldServer):
    def __init__(self, objects: int = 64) -> None:
        super().__init__(capacity=f"{OBJECT * objects}B")
        self.set(*settings(Path(self.endpoint.removeprefix("ipc://")).parent))


def test_a_killed_server_whose_l1_is_kept_tells_it_again() -> None:
    with HeldTellingServer() as server, router(server) as reader:
        with server.client() as client:
            engine = Engine(client)
            for tokens in PROMPTS:
                engine.store(tokens)
            engine.store(prompt(9, 2), salt="secret of acme")
            held = found(engine, PROMPTS)
        reader.until(held)
        assert not any(b"secret of acme" in each.read_bytes() for each in ledgers(server))
        pid = server.pid
        server.kill9()
        server.serving(pid)
        with server.client() as client:
            engine = Engine(client)
            assert found(engine, PROMPTS) == held
            with router(server) as late:
                late.until(held)
            reader.until(held)
            assert client.status()["events"]["blocks"]["CPU"] == len(held)
            engine.store(prompt(99, 3))
            reader.until(held | beginnings(prompt(99, 3)))


def test_a_server_that_stops_takes_back_what_ends_with_it() -> None:
    with TellingServer() as server, router(server) as reader:
        reader.until(store_all(server))
        asked = reader.replays
        server.stop()
        reader.until(set())
        assert reader.replays == asked


def aged(server: ServerProcess, number: int) -> None:
    """Start a server again as one that has sent so many messages."""
    server.stop()
    (path,) = (each for each in ledgers(server) if not each.suffix)
    ledger = Ledger(path, keeps=False)
    ledger.open()
    ledger.rewrite(number, {}, (), ())
    ledger.close()
    server.start()


def answered(socket: zmq.Socket[bytes]) -> int:
    numbers = []
    while numbers[-1:] != [(1 << 64) - 1]:
        assert socket.poll(30_000), "the answer has no end"
        numbers.append(int.from_bytes(socket.recv_multipart()[2], "big"))
    assert numbers[:-1] == list(range(len(numbers) - 1))
    return len(numbers)


def test_an_answer_under_way_is_ended_by_a_server_that_stops() -> None:
    """Dynamo waits for the end of an answer, and hears nothing else until then."""
    with TellingServer() as server:
        aged(server, 20_000)
        store_all(server)
        with router(server) as reader, ThreadPoolExecutor() as pool:
            asking = reader.question(0)
            assert asking.poll(30_000)
            stopped = pool.submit(server.stop)
            answered(asking)
            assert stopped.result() == 0
            asking.close()


def test_readers_that_read_nothing_cost_what_their_queues_hold() -> None:
    with TellingServer() as server:
        aged(server, 100_000)
        held = store_all(server)
        with router(server) as reader, ExitStack() as closing:
            stuck = []
            for _ in range(5):
                socket = reader.question(0, most=1)
                closing.callback(socket.close)
                stuck.append(socket)
            with router(server) as late:
                late.until(held)
            with server.client() as client:
                wait_until(
                    lambda: client.status()["events"]["counters"]["unread_replays"] == 5, 60, "the ends of answers"
                )
            for socket in stuck:
                assert answered(socket) < 50_000


def test_what_is_handed_over_stays_told_and_ends_with_the_last_server() -> None:
    secret = array.array("I", PROMPTS[0]).tobytes()
    with TellingServer() as server, router(server) as reader:
        held = store_all(server)
        reader.until(held)
        for _ in range(2):
            with server.client() as client:
                Engine(client).store(prompt(9, 2), salt="secret of acme")
            assert server.take_over() == 0
            with router(server) as late:
                late.until(held)
            reader.until(held)
            with server.client() as client:
                assert found(Engine(client), PROMPTS) == held
            # Without a keeper the tokens are on disk only from one server to the next.
            assert not any(secret in each.read_bytes() for each in ledgers(server))
        server.stop()
        reader.until(set())


def churn(server: ServerProcess, prompts: list[list[int]], steps: int, dice: Random) -> set[tuple[int, ...]]:
    """Two engines store more than L1 holds, load, and clear now and then; return what lookups find then."""
    with server.client() as one, server.client() as other:
        engines = [Engine(one, 1), Engine(other, 2)]
        for _ in range(steps):
            engine, tokens = dice.choice(engines), dice.choice(prompts)
            if dice.random() < 0.6:
                engine.store(tokens)
            elif not engine.load(tokens) and dice.random() < 0.05:
                one.call("CLEAR", m.Clear())
        return found(engines[0], prompts)


def test_churn_over_kills_and_stops_leaves_every_reader_with_what_l1_holds() -> None:
    """One reader hears all, one loses most messages, one comes in each life; a keeper holds L1 over kills."""
    dice = Random(9)
    prompts = [prompt(number, dice.randint(1, 4)) for number in range(200, 250)]
    with HeldTellingServer(objects=36) as server, router(server) as reader, router(server) as deaf:
        for _ in range(3):
            deaf.lost = set(range((deaf.next or 0) + 1, (deaf.next or 0) + 200))
            held = churn(server, prompts, 60, dice)
            assert held
            reader.until(held)
            # Starts that end sooner count as failed: after three in a row nothing is kept.
            wait_until(lambda: server.status()["server"]["uptime_s"] > 2, 30, "a server that has served")
            pid = server.pid
            server.kill9()
            server.serving(pid)
            with server.client() as client:
                assert found(Engine(client), prompts) == held, "a keeper holds L1"
                counters = client.status()["events"]["counters"]
                assert counters["dropped"] == counters["mismatched"] == 0
            deaf.lost = set()
            with router(server) as late:
                late.until(held)
                reader.until(held)
                deaf.until(held)
        assert reader.kinds["BlockRemoved"] > 3
