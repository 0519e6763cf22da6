"""What the command is given: nodes, files, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvf_route.settings import Node, RouteConfig, configured, read_nodes
from kvframework.errors import ConfigError
from tests.core.cli.command import run


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
