"""Whom the router listens to, and where it answers: the command's options and its file of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from kvframework.api.endpoint import parse_endpoint
from kvframework.api.toml import convert, read_toml
from kvframework.errors import ConfigFieldError, EndpointError

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


class RouteOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[route]`: the options of the command that may also stand in the file of nodes. Keys are files, "" for none."""

    listen: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1:9310"
    blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] = 10_000_000
    client_key: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""


class RouteFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of nodes, and of what else the command is given."""

    route: RouteOptions = RouteOptions()
    node: list[Node] = []


class RouteConfig(RouteOptions, frozen=True):
    """What `kvframework route` is given: its options, nodes as texts, and the file of further ones."""

    nodes: tuple[str, ...] = ()
    nodes_file: str = ""


def configured(nodes: Sequence[str], nodes_file: str, given: Mapping[str, object]) -> RouteConfig:
    """The options that are given, and those of the file for all others. Blocking. Raises `ConfigFileError` and
    `ConfigFieldError`."""
    of_file = msgspec.structs.asdict(_read(nodes_file).route) if nodes_file else {}
    config = RouteConfig(nodes=tuple(nodes), nodes_file=nodes_file, **{**of_file, **given})
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigFieldError("tls_cert and tls_key must be set together", where="kvframework route", hint="set both")
    return config


def read_nodes(config: RouteConfig) -> list[Node]:
    """The nodes of now. Blocking. Raises `ConfigFileError`, `ConfigFieldError` and `EndpointError`."""
    nodes = [_parsed(text) for text in config.nodes]
    if config.nodes_file:
        nodes += _read(config.nodes_file).node
    if not nodes:
        raise ConfigFieldError(
            "no node is configured", where="kvframework route", available=_FORM, hint="give --node, or --nodes FILE"
        )
    for node in nodes:
        _check(node, config)
    return nodes


def _read(file: str) -> RouteFile:
    return convert(read_toml(Path(file), "--nodes"), RouteFile, where=file)


def _parsed(text: str) -> Node:
    name, equals, endpoints = text.partition("=")
    events, _, replay = endpoints.partition(",")
    if not (name and equals and events):
        raise ConfigFieldError(f"{text!r} is not a node", where="--node", available=_FORM)
    return Node(name, events, replay)


def _check(node: Node, config: RouteConfig) -> None:
    where = f"node {node.name!r}"
    for endpoint in filter(None, (node.events, node.replay)):
        if "*" in parse_endpoint(endpoint, where=where).host:
            raise EndpointError(
                f"{endpoint!r} is not an address to connect to",
                where=where,
                available="tcp://HOST:PORT, ipc://PATH",
                hint="write the node's host name or address",
            )
    if node.server_key and not config.client_key:
        raise ConfigFieldError(
            "the node's publisher has a key, but this router has none",
            where=where,
            hint="make a key with `kvframework keys new`, and set --client-key",
        )
