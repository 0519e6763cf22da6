"""The processes that watch a server: `kvframework observe`, and one that asks once for each line of its input.

`python -m kvframework_bench.observe.watcher KIND TARGET`: `observe` is the observing process, its target is its
`Start`. `scrape` gets the metrics of the observing process at a URL, and `explain` the requests that a server at an
endpoint has finished since the last time; a line answers each line. Each process ends with its parent.
"""

from __future__ import annotations

import http.client
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvf_demo.processes import uninterrupted
from kvframework.api.process import end_with_parent
from kvframework.client import KVClient
from kvframework.wire import messages as m
from kvframework_bench.pausable import PausableChild
from kvframework_bench.process import LineChannel, running
from kvframework_bench.server import PATIENT

# A paused process answers late.
_ANSWER_S = 60.0


def main(kind: str, target: str) -> int:
    end_with_parent()
    if kind == "observe":
        from kvf_observe import process

        return process.main([target])
    ask = {"scrape": _scraper, "explain": _follower}[kind](target)
    for _line in sys.stdin:
        ask()
        os.write(sys.stdout.fileno(), b"asked\n")
    return 0


def _scraper(url: str) -> Callable[[], None]:
    place = urlsplit(url)

    def scrape() -> None:
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_ANSWER_S)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK or b"kvframework_up" not in text:
            raise SystemExit(f"kvframework observe answered /metrics without metrics: status {answer.status}")

    return scrape


def _follower(endpoint: str) -> Callable[[], None]:
    client = KVClient(endpoint, name="bench explain", deadline_scale=PATIENT)
    _ = client.hello
    seen = client.request("RECENT", m.Recent(most=0), m.RecentReply, timeout=_ANSWER_S).last

    def follow() -> None:
        nonlocal seen
        seen = client.request("RECENT", m.Recent(seen), m.RecentReply, timeout=_ANSWER_S).last

    return follow


class Watcher:
    """One or two processes that watch a server while they are asked to; between `begin` and `end` they take processor
    time. `asked` counts."""

    def __init__(self, channel: LineChannel, observing: PausableChild | None) -> None:
        self.asked = 0
        self._channel = channel
        self._observing = observing
        self._answered = 0
        self.end()

    def begin(self) -> None:
        if self._observing is not None:
            self._observing.resume()

    def ask(self) -> None:
        """Have it scrape, or follow, once. Does not wait."""
        self.asked += 1
        self._channel.send(b"ask")

    def end(self) -> None:
        """Wait for what it was asked for, and until it uses no processor time. Raises `BenchFailed`."""
        while self._answered < self.asked:
            self._channel.receive()
            self._answered += 1
        if self._observing is not None:
            self._observing.pause()
            self._observing.await_paused()


@contextmanager
def scraping(name: str, endpoint: str, directory: Path) -> Iterator[Watcher]:
    """Yield a watcher that scrapes the metrics of a server, with an observing process of its own. Waits until that
    answers. For the main thread. Raises `BenchFailed`."""
    from kvf_observe.process import Start
    from kvframework.api.endpoint import ObserveConfig
    from kvframework.logs.process_log import LogForm

    start = Start(os.getpid(), endpoint, ObserveConfig("127.0.0.1:0"), LogForm("info", "human"))
    with ExitStack() as stack:
        command = _command("observe", msgspec.json.encode(start).decode())
        with uninterrupted():
            observing = stack.enter_context(PausableChild(f"{name}, observing", command, directory))
        observing.await_that(
            lambda: _url(observing) is not None, "has not logged the address where it listens", _ANSWER_S
        )
        url = _url(observing)
        assert url is not None
        child = stack.enter_context(running(f"{name}, scraping", _command("scrape", url), directory, piped=True))
        yield Watcher(LineChannel(child), observing)


@contextmanager
def following(name: str, endpoint: str, directory: Path) -> Iterator[Watcher]:
    """Yield a watcher that fetches the requests that a server has finished. Raises `BenchFailed`."""
    with running(f"{name}, explaining", _command("explain", endpoint), directory, piped=True) as child:
        yield Watcher(LineChannel(child), None)


def _command(kind: str, target: str) -> list[str]:
    return [sys.executable, "-m", "kvframework_bench.observe.watcher", kind, target]


def _url(observing: PausableChild) -> str | None:
    found = re.search(r"metrics, health and the page: (\S+)/", observing.log)
    return found and found[1]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
