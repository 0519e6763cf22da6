"""Whom the router listens to, and where it answers: the command's options and its file of nodes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec

from kvframework.api.installing import install_command
from kvframework.config import convert, parse_endpoint
from kvframework.config.toml import read_toml
from kvframework.errors import ConfigFieldError, EndpointError, PluginUnavailable

_FORM = "NAME=EVENTS or NAME=EVENTS,REPLAY, each tcp://HOST:PORT or ipc://PATH"
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class Publisher(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A publisher of a node's events. `replay` is where it tells missed ones, "" for nowhere; `server_key` is the file
    of its public key, "" for no CURVE. Of its topics those count that begin with `topic`."""

    events: str
    replay: str = ""
    server_key: str = ""
    topic: str = ""


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[node]]`: a publisher of what a request to `name` finds there. A name with several publishers has several
    tables, and a publisher may serve several names."""

    name: Name
    events: str
    replay: str = ""
    server_key: str = ""
    topic: str = ""

    @property
    def publisher(self) -> Publisher:
        return Publisher(self.events, self.replay, self.server_key, self.topic)


class Nodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of nodes."""

    node: list[Node] = []


class RouteConfig(msgspec.Struct, frozen=True):
    """The options of `kvframework route`."""

    nodes: tuple[str, ...] = ()
    nodes_file: str = ""
    blocks: int = 10_000_000
    client_key: str = ""
    listen: str = "127.0.0.1:9310"
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""


def check_extra(where: str = "kvframework route") -> None:
    """Raise `PluginUnavailable` without what the command needs."""
    for module in ("h11", "numpy"):
        if find_spec(module) is None:
            raise PluginUnavailable(f"it needs {module}", where=where, hint=install_command("route"))


def read_nodes(config: RouteConfig) -> list[Node]:
    """The nodes of now. Blocking. Raises `ConfigFileError`, `ConfigFieldError` and `EndpointError`."""
    nodes = [_parsed(text) for text in config.nodes]
    if config.nodes_file:
        path = Path(config.nodes_file)
        nodes += convert(read_toml(path, "--nodes"), Nodes, where=str(path)).node
    if not nodes:
        raise ConfigFieldError(
            "there is no node", where="kvframework route", available=_FORM, hint="give --node, or --nodes FILE"
        )
    for node in nodes:
        _check(node, config)
    return nodes


def _parsed(text: str) -> Node:
    name, equals, endpoints = text.partition("=")
    events, _, replay = endpoints.partition(",")
    if not (name and equals and events):
        raise ConfigFieldError(f"{text!r} is no node", where="--node", available=_FORM)
    return Node(name, events, replay)


def _check(node: Node, config: RouteConfig) -> None:
    where = f"node {node.name!r}"
    for endpoint in filter(None, (node.events, node.replay)):
        if "*" in parse_endpoint(endpoint, where=where).host:
            raise EndpointError(
                f"{endpoint!r} is no address to connect to",
                where=where,
                available="tcp://HOST:PORT, ipc://PATH",
                hint="write the name or address of the node",
            )
    if node.server_key and not config.client_key:
        raise ConfigFieldError(
            "its publisher has a key and this router has none",
            where=where,
            hint="make one with `kvframework keys new`, and name it with --client-key",
        )
