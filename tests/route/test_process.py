"""A router in a process of its own, and publishers over real sockets: late, lost, restarted, silent, hostile."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import zmq

from kvframework.messaging.curve import read_public, read_secret, write_curve_pair
from tests.route.publisher import TOPIC, ZmqPublisher, batch, removed, stored
from tests.route.route_process import RouteProcess
from tests.support.ports import free_port
from tests.support.server_process import fixture_of
from tests.support.waiting import wait_until

ANY = "tcp://127.0.0.1:*"
PROMPT = list(range(12))
FIRST = stored([1, 2], None, PROMPT[:8])
SECOND = stored([3], 2, PROMPT[8:])


def node(name: str, publisher: ZmqPublisher) -> tuple[str, str]:
    return "--node", f"{name}={publisher.events}" + (f",{publisher.replay}" if publisher.replay else "")


def is_connected(router: RouteProcess) -> bool:
    return all(each["in_step"] for each in router.publishers())


publisher = fixture_of(ZmqPublisher, ANY, ANY)


def test_a_late_joiner_learns_what_was_told_before_and_what_comes(publisher: ZmqPublisher) -> None:
    publisher.publish(FIRST)
    with RouteProcess(*node("a", publisher)) as router:
        wait_until(lambda: router.score(PROMPT) == {"a": {"cpu": 8}}, what="the replay")
        assert router.ask("GET", "/readyz") == (200, b"ok\n")
        publisher.publish(SECOND)
        wait_until(lambda: router.score(PROMPT) == {"a": {"cpu": 12}}, what="the event")
        publisher.publish(removed([2, 3]))
        wait_until(lambda: router.score(PROMPT) == {"a": {"cpu": 4}}, what="the removal")


def test_lost_batches_are_asked_for(publisher: ZmqPublisher) -> None:
    with RouteProcess(*node("a", publisher)) as router:
        publisher.publish(FIRST)
        wait_until(lambda: router.score(PROMPT) == {"a": {"cpu": 8}}, what="the event")
        publisher.lose(removed([1]))
        publisher.lose(stored([1], None, PROMPT[:4], medium="GPU"))
        publisher.publish(SECOND)
        wait_until(lambda: router.score(PROMPT) == {"a": {"gpu": 4, "cpu": 8}}, what="the lost ones")
        (told,) = router.publishers()
        assert (told["lost_batches"], told["forgotten"]) == (0, 0)


@pytest.mark.parametrize("first", [0, 5000], ids=["from 0", "going on"])
def test_a_publisher_that_restarts_holds_what_it_tells_then(first: int) -> None:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with RouteProcess("--node", f"a={events},{replay}") as router:
        with ZmqPublisher(events, replay) as before:
            before.publish(FIRST)
            before.publish(SECOND)
            wait_until(lambda: router.score(PROMPT) == {"a": {"cpu": 12}}, what="the state of the first")
        after = ZmqPublisher(events, replay, first=first)
        # As many batches as the first one told, so that the numbers alone say nothing.
        with after:
            after.publish(stored([1], None, PROMPT[:4], medium="GPU"))
            after.publish(stored([7], None, [9] * 4))
            wait_until(lambda: router.score(PROMPT) == {"a": {"gpu": 4}}, what="the state of the second")
            assert router.publishers()[0]["blocks"] == 2


def test_a_node_that_is_away_has_no_score_until_it_is_back() -> None:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with (
        ZmqPublisher(ANY) as other,
        RouteProcess(*node("b", other), "--node", f"a={events},{replay}", hasty=True) as router,
    ):
        wait_until(lambda: router.score(PROMPT) == {"b": {}}, what="the node that never was")
        assert router.ask("GET", "/readyz") == (200, b"ok\n")
        with ZmqPublisher(events, replay) as publisher:
            publisher.publish(FIRST)
            wait_until(lambda: router.score(PROMPT) == {"a": {"cpu": 8}, "b": {}}, what="the node")
        wait_until(lambda: router.score(PROMPT) == {"b": {}}, what="its end")
        with ZmqPublisher(events, replay) as publisher:
            publisher.publish(SECOND | {"parent_block_hash": None})
            wait_until(lambda: router.score(PROMPT[8:]) == {"a": {"cpu": 4}, "b": {}}, what="the node")
            assert router.score(PROMPT) == {"a": {}, "b": {}}


def test_without_an_answer_to_the_replay_events_count_as_they_come(publisher: ZmqPublisher) -> None:
    publisher.silent = True
    publisher.publish(FIRST)
    with RouteProcess(*node("a", publisher), hasty=True) as router:
        wait_until(lambda: router.publishers()[0]["failed_replays"], what="a failure")
        assert router.ask("GET", "/readyz") == (200, b"ok\n")
        publisher.publish(stored([3], None, PROMPT[8:]))
        wait_until(lambda: router.score(PROMPT[8:]) == {"a": {"cpu": 4}}, what="the event")
        assert router.score(PROMPT) == {"a": {}}
        publisher.silent = False
        wait_until(lambda: router.score(PROMPT) == {"a": {"cpu": 8}}, what="the replay, later")


def test_without_a_replay_a_gap_is_counted() -> None:
    with ZmqPublisher(ANY) as publisher, RouteProcess(*node("a", publisher)) as router:
        wait_until(lambda: is_connected(router), what="the connection")
        # The subscription takes effect some time after the connection.
        wait_until(lambda: publisher.publish(FIRST) or router.publishers()[0]["batches"], what="a batch")
        publisher.lose(FIRST)
        publisher.publish(SECOND)
        wait_until(lambda: router.score(PROMPT) == {"a": {"cpu": 12}}, what="the event")
        assert router.publishers()[0]["lost_batches"] == 1


def test_a_publisher_of_several_nodes_and_a_node_with_several_publishers(publisher: ZmqPublisher) -> None:
    """The node's server tells what both engines can load, an engine what it has itself."""
    publisher.publish(FIRST, SECOND)
    with ZmqPublisher(ANY, ANY) as engine:
        engine.publish(stored([b"x" * 32], None, PROMPT[:4], medium=None), topic=b"")
        with RouteProcess(*node("e1", publisher), *node("e2", publisher), *node("e2", engine)) as router:
            wait_until(lambda: is_connected(router), what="both")
            assert router.score(PROMPT, model="model") == {"e1": {"cpu": 12}, "e2": {"gpu": 4, "cpu": 8}}
            assert router.score(PROMPT, model="other") == {"e1": {}, "e2": {"gpu": 4}}


def test_a_hostile_publisher_harms_no_other(publisher: ZmqPublisher) -> None:
    publisher.publish(FIRST)
    with ZmqPublisher(ANY, ANY) as hostile, RouteProcess(*node("a", publisher), *node("h", hostile)) as router:
        wait_until(lambda: is_connected(router), what="both")
        for frames in ((b"",), (b"x", b"y", b"z"), (b"x", b"12345678"), (b"", b"", b"", b"", b"")):
            hostile.send_frames(*frames)
        hostile.publish(stored([1, 2, 3], None, PROMPT))
        hostile.publish_raw(b"\xc1")
        hostile.publish_raw(b"\x91" * 1_000_000)
        hostile.publish(7, None, ["BlockStored"], stored([1], None, [-1] * 4), removed([2**63 - 1] * 1000))
        for number in range(100):
            hostile.publish(stored([number], None, [number] * 4, size=4), topic=b"kv@%d@m" % number)
        hostile.send_frames(TOPIC, (2**64 - 1).to_bytes(8, "big"), batch())
        hostile.publish(stored([9], None, [9] * 4))
        wait_until(lambda: router.score(PROMPT)["h"] == {"cpu": 12}, what="what makes sense of it")
        assert router.score(PROMPT)["a"] == {"cpu": 8}
        # More than a message may have: the connection ends, and begins again.
        hostile.publish_raw(bytes(17 << 20))
        publisher.publish(SECOND)
        wait_until(lambda: router.score(PROMPT)["a"] == {"cpu": 12}, what="the other's event")
        (told,) = [each for each in router.publishers() if each["nodes"] == ["h"]]
        assert told["events_by_kind"]["malformed"] >= 8
        assert told["blocks"] <= 100
        assert router.process.poll() is None


def test_nodes_come_and_go_with_their_file(publisher: ZmqPublisher, tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    table = f'[[node]]\nname = "{{}}"\nevents = "{publisher.events}"\nreplay = "{publisher.replay}"\n'
    file.write_text(table.format("a"))
    publisher.publish(FIRST)
    with RouteProcess("--nodes", str(file)) as router:
        wait_until(lambda: router.score(PROMPT) == {"a": {"cpu": 8}}, what="the replay")
        file.write_text(table.format("a") + "[[node]]\nname = 7\n")
        router.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "the list of nodes is unchanged, because the file is" in router.log, what="the refusal")
        with ZmqPublisher(ANY, ANY) as other:
            other.publish(SECOND | {"parent_block_hash": None})
            second = table.replace(publisher.events, other.events).replace(publisher.replay, other.replay)
            file.write_text(table.format("renamed") + second.format("b"))
            router.process.send_signal(signal.SIGHUP)
            wait_until(lambda: router.score(PROMPT[8:]) == {"renamed": {}, "b": {"cpu": 4}}, what="the new node")
            assert router.score(PROMPT) == {"renamed": {"cpu": 8}, "b": {}}
            file.write_text(second.format("b"))
            router.process.send_signal(signal.SIGHUP)
            wait_until(lambda: router.score(PROMPT[8:]) == {"b": {"cpu": 4}}, what="the end of a node")
            assert [each["blocks"] for each in router.publishers()] == [1]


def test_over_curve(tmp_path: Path) -> None:
    for name in ("server", "router"):
        write_curve_pair(tmp_path / f"{name}.secret", tmp_path / f"{name}.public")
    with zmq.Context() as context, context.socket(zmq.PUB) as events, context.socket(zmq.ROUTER) as replay:
        for socket in (events, replay):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, read_secret(tmp_path / "server.secret"))
            socket.bind(ANY)
        first, second = (socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (events, replay))
        file = tmp_path / "nodes.toml"
        file.write_text(
            f'[[node]]\nname = "a"\nevents = "{first}"\nreplay = "{second}"\nserver_key = "{tmp_path}/server.public"\n'
        )
        assert read_public(tmp_path / "server.public")
        with RouteProcess("--nodes", str(file), "--client-key", str(tmp_path / "router.secret")) as router:
            assert replay.poll(60_000)
            identity, _, asked = replay.recv_multipart()
            assert asked == bytes(8)
            replay.send_multipart([identity, b"", TOPIC, bytes(8), batch(FIRST)])
            replay.send_multipart([identity, b"", b"", b"\xff" * 8, b""])
            wait_until(lambda: router.score(PROMPT) == {"a": {"cpu": 8}}, what="the replay")


def test_scores_are_answered_while_a_publisher_has_much_to_say(publisher: ZmqPublisher) -> None:
    publisher.publish(FIRST)
    with ZmqPublisher(ANY, ANY) as busy, RouteProcess(*node("a", publisher), *node("b", busy)) as router:
        wait_until(lambda: is_connected(router), what="both")
        stopping = threading.Event()

        def say() -> None:
            number = 10
            while not stopping.is_set():
                busy.publish(*(stored([number + each], None, [number + each] * 4) for each in range(50)))
                busy.publish(removed(list(range(number, number + 50))))
                number += 50

        talking = threading.Thread(target=say)
        talking.start()
        try:
            for _ in range(20):
                assert router.score(PROMPT)["a"] == {"cpu": 8}
        finally:
            stopping.set()
            talking.join()
