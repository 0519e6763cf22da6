"""A recording: lookups are fetched from a running server, and written without what they name. And what
`kvframework trace info` prints."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rich.table import Table

from kvf_plan.trace.form import UNKNOWN, Header, Request
from kvf_plan.trace.summary import Summary
from kvf_plan.trace.writing import DIGEST_BYTES, Anonymous, TraceFile
from kvframework.client import KVClient
from kvframework.errors import UnknownRequest, VersionMismatch
from kvframework.text import short_count, short_duration
from kvframework.wire import messages as m

POLL_S = 0.5


class _Counts(NamedTuple):
    """Of requests. `first` and `until`: when the first and the last of them began."""

    requests: int = 0
    lost: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    first: float = 0.0
    until: float = 0.0


class Recorder:
    """Fetches with `client`, which the caller closes, and writes to a new file at `path`."""

    def __init__(self, client: KVClient, path: Path, *, timeout_s: float) -> None:
        self.begun = False
        self._client = client
        self._path = path
        self._timeout_s = timeout_s
        self._numbers = Anonymous()
        self._last = 0
        self._missing = 0  # since the last request that was written
        self._chunk_tokens = 0
        self._fetched = self._written = _Counts()
        self._stop = threading.Event()

    def run(self, seconds: float) -> None:
        """Record for so long, or until SIGINT or SIGTERM. In the main thread. Raises what `KVClient` does,
        `VersionMismatch` for an older server, `RequestError` for another user's, and `TraceError`."""
        chunk_size = self._client.hello.chunk_size
        reply = self._ask(m.Trace())
        self._last = reply.last
        with self._until_signal(), TraceFile(self._path) as file:
            self.begun = True
            recorded_at = time.time()
            try:
                self._follow(file, reply, recorded_at, time.monotonic() + seconds)
            finally:
                if not self._chunk_tokens:
                    file.begin(chunk_size, recorded_at)

    def said(self) -> str:
        """Return what is in the file, in a sentence."""
        counts = self._written
        if not self._fetched.requests and not self._fetched.lost:
            return f"no request was recorded: no engine looked up a prompt at {self._client.endpoint} meanwhile"
        asked = counts.asked_tokens
        hit = f", {100 * counts.hit_tokens / asked:.0f}% of them hit" if asked else ""
        span = short_duration(counts.until - counts.first)
        text = f"{short_count(counts.requests)} requests in {span} for {short_count(asked)} tokens{hit}"
        lost = self._fetched.lost + self._fetched.requests - counts.requests
        return f"{text}; {short_count(lost)} more could not be recorded" if lost else text

    @contextmanager
    def _until_signal(self) -> Iterator[None]:
        """The first signal ends the recording between two questions, a second one interrupts what it still does."""

        def stop(number: int, _frame: FrameType | None) -> None:
            self._stop.set()
            signal.signal(number, signal.default_int_handler)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _follow(self, file: TraceFile, reply: m.TraceReply, recorded_at: float, end: float) -> None:
        while (left := end - time.monotonic()) > 0 and not self._stop.is_set():
            if not reply.more:
                self._pause(min(POLL_S, left))
            reply = self._ask(m.Trace(after=self._last))
            self._write(file, reply, recorded_at)
        more = True
        while more:
            reply = self._ask(m.Trace(after=self._last, done=True))
            self._write(file, reply, recorded_at)
            more = reply.more

    def _pause(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _ask(self, asked: m.Trace) -> m.TraceReply:
        try:
            return self._client.request("TRACE", asked, m.TraceReply, timeout=self._timeout_s)
        except UnknownRequest:
            raise VersionMismatch(
                "the server is of an older release that records no traces",
                where=self._client.endpoint,
                hint="install kvframework of this command's release on the server",
            ) from None

    def _write(self, file: TraceFile, reply: m.TraceReply, recorded_at: float) -> None:
        for each in reply.records:
            self._missed(each.number - self._last - 1)
            self._last = each.number
            if not self._chunk_tokens:
                self._chunk_tokens = each.chunk_tokens
                self._fetched = self._fetched._replace(first=each.began)
                file.begin(each.chunk_tokens, recorded_at)
            if each.chunk_tokens == self._chunk_tokens:
                file.add(self._request(each))
            else:  # a trace has one size of chunks
                self._missed(1)
        self._missed(reply.last - self._last)
        self._last = reply.last
        file.flush()
        self._written = self._fetched

    def _missed(self, requests: int) -> None:
        """Count requests that are not written. The numbers of a server that has started again begin at 1."""
        self._missing += max(requests, 0)
        self._fetched = self._fetched._replace(lost=self._fetched.lost + max(requests, 0))

    def _request(self, each: m.TracedLookup) -> Request:
        counts = self._fetched
        self._fetched = counts._replace(
            requests=counts.requests + 1,
            asked_tokens=counts.asked_tokens + each.end - each.start,
            hit_tokens=counts.hit_tokens + max(each.hit_tokens, 0),
            until=each.began,
        )
        missing, self._missing = self._missing, 0
        return Request(
            at=each.began - counts.first,
            tokens=len(each.digests) // DIGEST_BYTES * each.chunk_tokens,
            output_tokens=0,
            chunks=self._numbers.chunks(each.scope, each.digests),
            start=each.start,
            hit_tokens=each.hit_tokens,
            tenant=each.tenant,
            model=self._numbers.model(each.model),
            lost=missing,
        )


def table_of(header: Header, summary: Summary) -> Table:
    """Return the numbers of a trace, one a line, with what they mean."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    again = summary.chunks - summary.unique_chunks
    rate = f", {summary.requests / summary.span_s:.2f} per second" if summary.span_s else ""
    for name, value, meaning in (
        ("form", header.form, f"{header.chunk_tokens} tokens per chunk"),
        ("requests", short_count(summary.requests), f"in {short_duration(summary.span_s)}{rate}"),
        ("tokens", short_count(summary.tokens), f"of prompts, and {short_count(summary.output_tokens)} of answers"),
        ("chunks", short_count(summary.chunks), f"{short_count(summary.unique_chunks)} different chunks"),
        ("again", _share(again, summary.chunks), "of the chunks came before: the highest hit rate of any cache"),
        (
            "live set",
            short_count(summary.live_chunks),
            f"chunks, {_live(header, summary)}: the smallest L1 with the highest hit rate",
        ),
    ):
        table.add_row(name, value, meaning)
    if summary.hit_tokens != UNKNOWN:
        table.add_row("hit", _share(summary.hit_tokens, summary.asked_tokens), "of the recorded server's prompt tokens")
    if summary.tenants > 1 or summary.models > 1:
        table.add_row("tenants", short_count(summary.tenants), f"with {short_count(summary.models)} models")
    if summary.lost:
        table.add_row("missing", short_count(summary.lost), "requests that the recorder could not keep")
    return table


def _live(header: Header, summary: Summary) -> str:
    return f"{short_count(summary.live_chunks * header.chunk_tokens)} tokens"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"
