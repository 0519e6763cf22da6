"""The simulation of a trace; see the package."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvf_plan.simulation.chunks import Chunks
from kvf_plan.simulation.engines import Fleet
from kvf_plan.simulation.events import VirtualTime
from kvf_plan.simulation.node import Node
from kvf_plan.simulation.requests import Outcome, Requests
from kvf_plan.simulation.settings import Settings
from kvf_plan.simulation.sizes import sizes_of
from kvf_plan.trace.form import Trace
from kvframework.registry.registry import PluginRegistry

# Times of 0 mean "never" to some parts of a server.
START = 1000.0
# A tier that is down keeps its writer from coming to rest.
REST_S = 60.0
# Requests between two collections of garbage.
COLLECT_EVERY = 10_000


def simulate(trace: Trace, settings: Settings, registry: PluginRegistry | None = None) -> Outcome:
    """Run the requests of a trace, in its order, and return what came of them."""
    registry = registry or PluginRegistry()
    sizes = sizes_of(settings, registry, trace.header.chunk_tokens)
    chunks = Chunks(sizes.chunk_tokens, trace.header.chunk_tokens, whole=settings.whole_chunks)
    time = VirtualTime(START)
    fleet = None if settings.engines is None else Fleet(settings.engines, time)
    with _unlogged():
        node = Node(sizes, registry, time, 1 if fleet is None else len(fleet.queues))
        try:
            requests = Requests(node, chunks, fleet)
            with _uncollected():
                _run(trace, node, requests)
            return requests.outcome(sizes)
        finally:
            node.close()


@contextmanager
def _unlogged() -> Iterator[None]:
    """Without log lines: what a simulated server would say is no news of this process."""
    logger = logging.getLogger("kvframework")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of garbage: the server's objects make circles only where a tier fails, and it takes a
    fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _run(trace: Trace, node: Node, requests: Requests) -> None:
    time = node.time
    node.settle()
    for number, prompt in enumerate(trace, 1):
        if number % COLLECT_EVERY == 0:
            gc.collect()
        at = START + prompt.at
        while time.next_at() < at:
            time.happen()
            node.settle()
        time.now = max(time.now, at)
        requests.arrived(prompt)
        node.settle()
        if requests.in_turn:
            _rest(node, requests)
    _rest(node, requests)


def _rest(node: Node, requests: Requests) -> None:
    """Let all go on that is under way, as long as it comes to an end."""
    time = node.time
    until = time.now + REST_S
    while requests.under_way or (not node.at_rest and time.now < until):
        time.happen()
        node.settle()
        if requests.under_way:
            until = time.now + REST_S
