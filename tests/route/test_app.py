"""The answers of the router without a socket: requests that are none, rights, health, metrics. What the command is
given: nodes, files, and what is wrong with them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvf_observe.http.exposition import OPEN_METRICS, TEXT
from kvf_observe.http.messages import Reply, Request, Rights, WantsBody
from kvf_route.app import METRICS, MOST_TOKENS, App
from kvf_route.router import Router
from kvf_route.settings import Node, RouteConfig, configured, read_nodes
from kvframework.errors import ConfigError
from tests.core.cli.command import run
from tests.route.publisher import TOPIC, batch, stored

NODES = [Node("a", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), Node("b", "ipc:///nowhere/b")]
TOKENS = list(range(8))
SECRET = "a salt that nobody may see"


class Asking:
    """An app whose publishers are not there, and what `a` would have told."""

    def __init__(self, token: str = "", *, loopback: bool = False) -> None:
        self._loop = asyncio.new_event_loop()
        self.router = self._loop.run_until_complete(self._made())
        self.app = App(self.router, Rights(lambda: token, loopback=loopback))
        told = stored([1, 2], None, TOKENS, cache_salt=SECRET), stored([3], None, TOKENS[:4])
        next(iter(self.router._followed.values())).contents.apply(TOPIC, batch(*told))

    async def _made(self) -> Router:
        router = Router(1000)
        router.follow(NODES)
        return router

    def close(self) -> None:
        self._loop.run_until_complete(self.router.stop())
        self._loop.close()

    def ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> Reply:
        reply = self.app.answer(Request(method, target, headers))
        if isinstance(reply, WantsBody):
            reply = reply.answer(bytearray(body))
        return reply if isinstance(reply, Reply) else self._loop.run_until_complete(reply)

    def score(self, **asked: Any) -> Any:
        reply = self.ask("POST", "/score", json.dumps(asked).encode())
        return reply.status, json.loads(reply.body)


@pytest.fixture
def asking() -> Iterator[Asking]:
    made = Asking()
    yield made
    made.close()


def test_scores(asking: Asking) -> None:
    assert asking.score(tokens=TOKENS) == (200, {"a": {"cpu": 4}, "b": {}})
    assert asking.score(tokens=TOKENS, salt=SECRET, model="model") == (200, {"a": {"cpu": 8}, "b": {}})
    assert asking.score(tokens=[]) == (200, {"a": {}, "b": {}})
    assert asking.score(digests=["00" * 32], model="model") == (200, {"a": {}, "b": {}})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "truncated"),
        (b"[]", "object"),
        (b"{}", "tokens or digests"),
        (b'{"tokens": [1], "digests": []}', "tokens or digests"),
        (b'{"tokens": [1, -1]}', r"`int` >= 0 - at `\$\.tokens\[1\]`"),
        (b'{"tokens": [4294967296]}', r"<= 4294967295 - at `\$\.tokens\[0\]`"),
        (b'{"tokens": [1e400]}', "range"),
        (b'{"tokens": [true]}', "bool"),
        (b'{"tokens": ["1"]}', "int"),
        (b'{"tokens": [1], "modell": "m"}', "modell"),
        (b'{"digests": []}', "a request with digests needs `model`"),
        (b'{"digests": ["zz"], "model": "m"}', "hexadecimal"),
        (b'{"digests": ["00"], "model": "m"}', "32 bytes"),
        (b'{"digests": [], "model": "m", "chunk_tokens": 0}', ">= 1"),
        (json.dumps({"tokens": [0] * (MOST_TOKENS + 1)}).encode(), "length"),
        (json.dumps({"tokens": "x", "salt": SECRET}).encode(), "array"),
    ],
)
def test_a_request_that_is_none_is_told_why(asking: Asking, body: bytes, said: str) -> None:
    reply = asking.ask("POST", "/score", body)
    assert reply.status == 400
    text = json.loads(reply.body)["error"]
    assert re.search(said, text), text
    assert SECRET not in text


def test_what_is_refused_is_not_sent_back(asking: Asking) -> None:
    """Answers that nobody takes are held for a while, and have no bound together."""
    reply = asking.ask("POST", "/score", b'{"' + b"x" * (1 << 20) + b'": 1}')
    assert reply.status == 400
    assert "unknown field `xxx" in json.loads(reply.body)["error"]
    assert len(reply.body) < 1000


def test_paths_and_methods(asking: Asking) -> None:
    assert asking.ask("GET", "/nowhere").status == 404
    assert asking.ask("GET", "/score").status == 405
    assert asking.ask("POST", "/metrics").status == 405
    assert asking.ask("HEAD", "/metrics").status == 200
    assert asking.ask("GET", "/livez").body == b"ok\n"


def test_it_is_ready_once_all_that_are_there_were_heard(asking: Asking) -> None:
    """Of `b`, which has no replay, there is nothing to wait for."""
    assert asking.ask("GET", "/readyz")[:3] == (503, "text/plain; charset=utf-8", b"failed\n")
    assert asking.ask("GET", "/readyz?verbose").body == b"[-]tcp://127.0.0.1:1 has events that are not received yet\n"


def test_rights() -> None:
    with closing(Asking("token", loopback=True)) as asking:
        here = {"host": "127.0.0.1:9310"}
        assert asking.ask("POST", "/score", b"{}", **here).status == 401
        assert asking.ask("GET", "/publishers", **here).status == 401
        assert asking.ask("GET", "/livez", **here).status == 200
        assert asking.ask("GET", "/readyz?verbose", **here).body == b"failed\n"
        assert asking.ask("GET", "/livez", host="page.example").status == 421
        assert asking.ask("GET", "/publishers", **here, authorization="Bearer token").status == 200


def test_metrics(asking: Asking) -> None:
    asking.score(tokens=TOKENS)
    asking.score(nothing=1)
    reply = asking.ask("GET", "/metrics")
    assert reply.type == TEXT
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }
    a = NODES[0].events
    assert found["kvframework_route_blocks", a] == 3
    assert found["kvframework_route_announced_blocks_total", a, "stored"] == 3
    assert found["kvframework_route_connected", a] == 0
    assert found["kvframework_route_requests_total",] == 1
    assert found["kvframework_route_refused_requests_total",] == 1
    assert found["kvframework_route_score_seconds_count",] == 1
    assert {name.partition("_seconds")[0] for name, *_ in found} == {
        metric.full.partition("_seconds")[0] for metric in METRICS
    }
    reply = asking.ask("GET", "/metrics", accept="application/openmetrics-text")
    assert reply.type == OPEN_METRICS
    assert reply.body.endswith(b"# EOF\n")


def test_no_salt_is_shown(asking: Asking) -> None:
    asking.score(tokens=TOKENS, salt=SECRET)
    for path in ("/metrics", "/publishers", "/readyz?verbose"):
        assert SECRET.encode() not in asking.ask("GET", path).body


def test_nodes_of_the_command_line_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text('[[node]]\nname = "c"\nevents = "tcp://c:1"\nserver_key = "c.public"\ntopic = "kv@c@"\n')
    config = RouteConfig(nodes=("a=tcp://a:1,tcp://a:2", "b=ipc:///run/b"), nodes_file=str(file), client_key="r.secret")
    assert read_nodes(config) == [
        Node("a", "tcp://a:1", "tcp://a:2"),
        Node("b", "ipc:///run/b"),
        Node("c", "tcp://c:1", "", "c.public", "kv@c@"),
    ]


def test_options_of_the_command_line_come_before_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "route.toml"
    file.write_text(
        '[route]\nlisten = "h:1"\nblocks = 7\nclient_key = "k"\n[[node]]\nname = "a"\nevents = "tcp://a:1"\n'
    )
    config = configured(["b=tcp://b:1"], str(file), {"blocks": 8})
    assert config == RouteConfig(listen="h:1", blocks=8, client_key="k", nodes=("b=tcp://b:1",), nodes_file=str(file))
    assert [node.name for node in read_nodes(config)] == ["b", "a"]
    assert configured([], "", {}) == RouteConfig()
    for text, said in (("blocks = 0", ">= 1"), ("blocs = 1", "unknown field `blocs`"), ("tls_cert = 'c'", "tls_key")):
        file.write_text(f"[route]\n{text}\n")
        with pytest.raises(ConfigError, match=said):
            configured([], str(file), {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "no node is configured"),
        (("a",), "'a' is not a node"),
        (("=tcp://a:1",), "is not a node"),
        (("a=a:1",), "'a:1' is not an endpoint"),
        (("a=tcp://*:1",), "'tcp://\\*:1' is not an address to connect to"),
        (("a=tcp://a:1,inproc://x",), "'inproc://x' is not an endpoint"),
    ],
)
def test_what_is_no_node(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_nodes(RouteConfig(nodes=given))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node = 1", "expected a list, found an integer"),
        ("[[node]]\nname = ''\nevents = 'tcp://a:1'", "length"),
        ("[[node]]\nname = 'a'", "events"),
        ("[[nodes]]\nname = 'a'", "unknown key 'nodes'"),
        ("[[node", "end of document"),
        ("[[node" + ".a" * 3000 + "]]", "line 1: tables are nested more than"),
        ("[[node]]\nname = 'a'\nevents = 'tcp://a:1'\nserver_key = 'k'", "this router has none"),
    ],
)
def test_what_is_no_file_of_nodes(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_nodes(RouteConfig(nodes_file=str(file)))


def test_the_command_refuses_what_cannot_work(tmp_path: Path) -> None:
    assert "no node is configured" in run("route").stderr
    done = run("route", "--nodes", str(tmp_path / "none.toml"))
    assert (done.returncode, "cannot be read" in done.stderr, "check --nodes" in done.stderr) == (2, True, True)
    assert run("route", "--node", "a=tcp://a:1", "--tls-cert", "c.pem").returncode == 2
    done = run("route", "--node", "a=tcp://a:1", "--token-file", str(tmp_path / "none"))
    assert (done.returncode, f"the token file {tmp_path}/none cannot be read" in done.stderr) == (2, True)
