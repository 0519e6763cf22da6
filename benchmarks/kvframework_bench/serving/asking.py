"""The client: sends requests over HTTP when they are due, however many are unanswered, and times what streams back.

An open loop: times count from the moment a request was due, so that a client that is late hides nothing. One thread,
one connection a request, as many at once as it takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import h11
import msgspec

from kvframework_bench.errors import BenchFailed

_ANSWER_S = 300.0
_READ = 1 << 16
_SHOWN = 400


class Due(msgspec.Struct, frozen=True):
    """A request of `/v1/completions`: when, in seconds from the beginning, to which port, its body as JSON, and how
    many tokens the answer has to have."""

    at: float
    port: int
    body: bytes
    answer_tokens: int


class Answer(msgspec.Struct, frozen=True):
    """`first_s` and `end_s` are the seconds from the moment it was due to the first token, and to the end; `cached`
    tokens of the `prompt` were not computed, as the engine says."""

    first_s: float
    end_s: float
    tokens: list[int]
    prompt: int
    cached: int
    # Between a token and the next, in seconds.
    gaps_s: list[float] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_event = msgspec.json.Decoder(_Event)


def body(model: str, prompt: Sequence[int], answer_tokens: int, **connector: bool) -> bytes:
    """Return a request for a greedy answer of so many tokens, as a stream that ends with the usage; `connector` are its
    `kv_transfer_params`."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            **({"kv_transfer_params": connector} if connector else {}),
        }
    )


def ask_all(asked: Sequence[Due]) -> tuple[list[Answer], float]:
    """Return the answers in the order of `asked`, and the seconds until the last one ended.

    Blocks so long. Raises `BenchFailed` for an answer with an error, of another length or that ends early, and
    `OSError` if a server cannot be reached.
    """
    return asyncio.run(_ask_all(asked))


async def _ask_all(asked: Sequence[Due]) -> tuple[list[Answer], float]:
    # All connections are made in this thread, none of them before the clock runs.
    began = time.perf_counter() + 0.01
    tasks = [asyncio.ensure_future(ask(due, began + due.at)) for due in asked]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers, max(due.at + answer.end_s for due, answer in zip(asked, answers, strict=True))


async def ask(due: Due, at: float) -> Answer:
    """Return the answer to one request, which is due at that time of `time.perf_counter`. Raises as `ask_all` does."""
    await asyncio.sleep(at - time.perf_counter())
    try:
        return await asyncio.wait_for(_exchange(due, at), _ANSWER_S)
    except asyncio.TimeoutError:
        raise BenchFailed(f"an answer of the engine has not ended after {_ANSWER_S:.0f} s") from None


async def _exchange(due: Due, at: float) -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", due.port)
    try:
        http, stream = h11.Connection(h11.CLIENT), _Stream(at)
        headers = [("Host", "127.0.0.1"), ("Content-Type", "application/json"), ("Content-Length", str(len(due.body)))]
        for event in (
            h11.Request(method="POST", target="/v1/completions", headers=headers),
            h11.Data(data=due.body),
            h11.EndOfMessage(),
        ):
            writer.write(http.send(event) or b"")
        while not await _read(http, reader, stream):
            pass
    finally:
        writer.close()
    return stream.answer(due.answer_tokens)


async def _read(http: h11.Connection, reader: asyncio.StreamReader, stream: _Stream) -> bool:
    """Take in the next event of HTTP; return whether it was the last one. Raises `BenchFailed`."""
    try:
        event = http.next_event()
    except h11.RemoteProtocolError as error:
        raise BenchFailed(f"an answer of the engine ended early: {error}") from error
    if event is h11.NEED_DATA:
        http.receive_data(await reader.read(_READ))
    elif isinstance(event, h11.Response):
        stream.status = event.status_code
    elif isinstance(event, h11.Data):
        stream.feed(bytes(event.data))
    return isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed))


@dataclass
class _Stream:
    """The events of one answer as they come."""

    at: float
    status: int = 0
    _unread: bytes = b""
    _tokens: list[int] = field(default_factory=list)
    _first: float = 0.0
    _last: float = 0.0
    _gaps: list[float] = field(default_factory=list)
    _usage: _Usage | None = None

    def feed(self, data: bytes) -> None:
        """Take in bytes of the body. Raises `BenchFailed` for what is no event."""
        now = time.perf_counter()
        *lines, self._unread = (self._unread + data).split(b"\n")
        if self.status != 200:
            self._unread = b"\n".join([*lines, self._unread])
            return
        for line in lines:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                self._take(line[6:], now)

    def _take(self, text: bytes, now: float) -> None:
        try:
            event = _event.decode(text)
        except msgspec.DecodeError as error:
            raise BenchFailed(f"the engine answers {_shown(text)}, which is not a completion: {error}") from error
        if bytes(event.error):
            raise BenchFailed(f"the engine answers: {_shown(bytes(event.error))}")
        for choice in event.choices:
            if choice.token_ids:
                if self._tokens:
                    self._gaps.append(now - self._last)
                # Tokens that come together.
                self._gaps += [0.0] * (len(choice.token_ids) - 1)
                self._first, self._last = self._first or now, now
                self._tokens += choice.token_ids
        self._usage = event.usage or self._usage

    def answer(self, expected: int) -> Answer:
        """Return the answer at its end. Raises `BenchFailed` if it is not whole."""
        if self.status != 200:
            raise BenchFailed(f"the engine answers with status {self.status}: {_shown(self._unread)}")
        if len(self._tokens) != expected or self._usage is None:
            raise BenchFailed(f"an answer of the engine has {len(self._tokens)} of {expected} tokens")
        details = self._usage.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        ended = time.perf_counter()
        return Answer(
            self._first - self.at, ended - self.at, self._tokens, self._usage.prompt_tokens, cached, self._gaps
        )


def _shown(text: bytes) -> str:
    return text[:_SHOWN].decode(errors="replace")
