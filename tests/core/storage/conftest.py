"""A storage manager over doubles, closed after each test; no storage thread may be left then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.core.storage.node import MakeNode, Node
from tests.support.waiting import wait_until


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(**options: object) -> Node:
        nodes.append(Node(**options))  # type: ignore[arg-type]
        return nodes[-1]

    yield make
    for node in nodes:
        for tier in node.tiers:
            tier.resume()
        node.manager.close()
        assert node.memory.closed
    wait_until(lambda: not storage_threads(), what="the end of all storage threads")


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    return make_node()


def storage_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("kvf-writer", "kvf-prefetch"))]
