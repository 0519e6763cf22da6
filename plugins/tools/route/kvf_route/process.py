"""The process of `kvframework route`: one event loop that follows publishers and answers HTTP, until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial

from kvf_observe.http.listener import Listener, listen_until_signal
from kvf_observe.http.messages import Rights
from kvf_observe.http.settings import is_loopback, read_token, refusals, tls_context
from kvf_route.app import App
from kvf_route.router import Router
from kvf_route.settings import Node, RouteConfig, read_nodes
from kvframework.api.endpoint import parse_listen
from kvframework.errors import KVFrameworkError

log = logging.getLogger(__name__)

WHERE = "kvframework route"


def check(config: RouteConfig) -> None:
    """Raise the first error with which `route` would refuse to start, if there is one. Blocking."""
    read_nodes(config)
    for refusal in refusals(config, WHERE):
        raise refusal


def route(config: RouteConfig) -> None:
    """Follow and answer until SIGINT or SIGTERM; SIGHUP reads the file of nodes again. In the main thread, after
    `check`. Raises `ConfigError`, also of what has changed since."""
    asyncio.run(_run(config, read_nodes(config)))


async def _run(config: RouteConfig, nodes: list[Node]) -> None:
    router = Router(config.blocks, config.client_key)
    router.follow(nodes)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _read_again, router, config)
    host, _ = parse_listen(config.listen)
    app = App(router, Rights(partial(read_token, config), loopback=is_loopback(host)))
    listener = Listener(app.answer, tls=tls_context(config))
    log.info("%d nodes, room for %d blocks in %d MB", len(nodes), config.blocks, router.index.bytes // 10**6)
    try:
        await listen_until_signal(listener, config, WHERE, "scores")
    finally:
        await router.stop()


def _read_again(router: Router, config: RouteConfig) -> None:
    """A file with a mistake changes nothing."""
    try:
        nodes = read_nodes(config)
        router.follow(nodes)
    except KVFrameworkError as error:
        log.error("the nodes stay as they are: %s", error)
        return
    log.info("the nodes were read again: %d", len(nodes))
