"""The process of `kvframework observe`: the polling thread, and one thread that answers HTTP, until a signal."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvf_observe.app import App
from kvf_observe.http.listener import Listener, listen_until_signal
from kvf_observe.http.messages import Rights, is_loopback, read_token, tls_context
from kvf_observe.metrics import NOTHING_TRACED
from kvf_observe.poller import ANSWER_S, History, Poller
from kvf_observe.settings import refusals
from kvframework.api.endpoint import ObserveConfig, collector_url, parse_endpoint, parse_listen
from kvframework.api.process import LogForm, configure_logging, end_logging, end_with_parent
from kvframework.client import StatusSource
from kvframework.errors import KVFrameworkError

if TYPE_CHECKING:
    from kvf_observe.spans import SpanExport

log = logging.getLogger(__name__)


class Start(msgspec.Struct, frozen=True):
    """The argument of a process that a server starts; `parent` is the server's process id."""

    parent: int
    endpoint: str
    config: ObserveConfig
    log: LogForm


def check(endpoint: str, config: ObserveConfig, *, where: str = "") -> None:
    """Raise `EndpointError` or the first error of `settings.refusals`, if there is one. Blocking."""
    parse_endpoint(endpoint)
    for refusal in refusals(config, where):
        raise refusal


def observe(endpoint: str, config: ObserveConfig, *, where: str = "") -> None:
    """Answer HTTP about the server at `endpoint`, whether or not it is there, until SIGINT or SIGTERM. In the main
    thread, after `check`. Raises `EndpointError`, and `OSError` of files that have vanished since."""
    # The connection says the same at each try; the poller says it once.
    logging.getLogger("kvframework.messaging").setLevel(logging.CRITICAL)
    history = History()
    poller = Poller(StatusSource(endpoint, ANSWER_S, name="observe"), history.add)
    host, _ = parse_listen(config.listen)
    spans = _span_export(endpoint, config)
    app = App(
        lambda: poller.latest,
        history,
        rights=Rights(partial(read_token, config), loopback=is_loopback(host)),
        traced=spans.counts if spans else NOTHING_TRACED,
    )
    listener = Listener(app.answer, tls=tls_context(config))
    poller.start()
    if spans:
        spans.start()
    try:
        asyncio.run(listen_until_signal(listener, config, where, "metrics, health and the page"))
    finally:
        if spans:
            spans.stop()
        poller.stop()


def main(arguments: list[str]) -> int:
    """Run as the child of a server, with which it ends. The only argument is a `Start`. Returns the exit status."""
    start = msgspec.json.decode(arguments[0], type=Start)
    end_with_parent(start.parent)
    configure_logging(*start.log)
    try:
        check(start.endpoint, start.config, where="[observe]")
        observe(start.endpoint, start.config, where="[observe]")
    except KVFrameworkError as error:
        log.error("%s", error)
        return 1
    finally:
        end_logging()
    return 0


def _span_export(endpoint: str, config: ObserveConfig) -> SpanExport | None:
    if not config.traces:
        return None
    from kvf_observe.spans import SpanExport  # only who traces needs OpenTelemetry

    return SpanExport(StatusSource(endpoint, ANSWER_S, name="observe"), collector_url(config.traces))
