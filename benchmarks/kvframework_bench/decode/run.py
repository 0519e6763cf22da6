"""The measurement: vLLM's server answers one request, and meanwhile others of long prompts, one after the other.

The long prompts are in the server's L1. Asked in turn they are never in the engine's own cache, which is too small for
them all, so each is loaded; one that is asked again at once is there. Both leave the same to compute, one token, in a
step that reads all their KV. That step is not counted: what counts are the tokens that come while a request waits.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import msgspec

from kvframework.api.plugin import ByteSize
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.decode.figures import DecodeFigures, Window, gaps_within, rows_of
from kvframework_bench.errors import BenchFailed, BenchUnavailable
from kvframework_bench.machine import available_bytes
from kvframework_bench.process import adopting, scratch
from kvframework_bench.serving.asking import Answer, Due, ask, ask_all, body
from kvframework_bench.serving.contenders import CONTENDERS, Contender
from kvframework_bench.serving.engines import BLOCK_TOKENS, SERVED, Engine, EngineSettings, running_engine
from kvframework_bench.serving.model import SHAPES, made_model, read_config
from kvframework_bench.serving.run import Launch, halves

ALONE, HELD, LOADED = "alone", "beside prompts in the engine's cache", "beside loads"
_PROMPTS = 4
# Beside two of the prompts the measured answer has to fit.
_SPARE_TOKENS = 1024
# One request in this time, or as soon as the one before it is answered.
_PERIOD_S = 0.1
_FIRST_TOKEN = 300
_LOADED = re.compile(rb"^kvframework:loaded_tokens_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


class DecodeSizes(msgspec.Struct, frozen=True):
    """`prompt_tokens` are whole chunks: the last token of a request is one more, which is computed."""

    rounds: int
    prompt_tokens: int = 4096
    answer_tokens: int = 512
    first_tokens: int = 64
    engine_bytes: int = 2 << 30


FULL = DecodeSizes(rounds=5)
QUICK = DecodeSizes(rounds=1, answer_tokens=128)


def bench_decode(
    sizes: DecodeSizes,
    *,
    model: Path | None = None,
    stage: Stage = no_progress,
    launch: Launch = running_engine,
    contender: Contender = CONTENDERS[-1],
) -> DecodeFigures:
    """Measure; takes five minutes. `model` is a folder, None for the bench's own.

    Raises `BenchUnavailable` for a folder without a model or too little memory, and `BenchFailed`, with the end of its
    log, for an engine that does not start or ends, or that loads where it should not, or not where it should.
    """
    with scratch() as directory, adopting():
        own = model is None
        model = model or made_model(directory, "large_kv")
        config = read_config(model)
        longest = sizes.prompt_tokens + 1
        if config.max_position_embeddings < longest:
            raise BenchUnavailable(
                f"the model's prompts have at most {config.max_position_embeddings} tokens",
                where=f"--model {model}",
                available=f"{longest} tokens",
            )
        prompt_bytes = sizes.prompt_tokens * config.kv_bytes
        tokens = 2 * (longest + BLOCK_TOKENS) + _SPARE_TOKENS
        capacity = (_PROMPTS + 1) * prompt_bytes
        needed = capacity + tokens * config.kv_bytes + sizes.engine_bytes
        if (there := available_bytes()) < needed:
            raise BenchUnavailable(
                f"the benchmark needs {ByteSize(needed)} of memory, but {ByteSize(there)} are available"
            )
        settings = EngineSettings(model, longest + BLOCK_TOKENS, tokens * config.kv_bytes)
        cores = halves(sorted(os.sched_getaffinity(0)))[0]
        with (
            contender.open(directory, capacity) as offload,
            launch("the engine", settings, offload.options, cores, directory) as engine,
        ):
            with stage("starting vLLM", 1) as advance:
                engine.await_answer()
                advance()
            windows = _Measured(engine, sizes, config.vocab_size).rounds(stage)
    return DecodeFigures(
        str(SHAPES["large_kv"]) if own else model.name,
        sizes.prompt_tokens,
        prompt_bytes,
        sizes.answer_tokens,
        rows_of(windows, ALONE, HELD),
    )


class _Measured:
    """One engine and the requests that it gets."""

    def __init__(self, engine: Engine, sizes: DecodeSizes, vocabulary: int) -> None:
        self._engine = engine
        self._sizes = sizes
        self._random = random.Random(7)
        self._vocabulary = vocabulary
        self._long = [self._body(sizes.prompt_tokens + 1, 1) for _ in range(_PROMPTS)]

    def rounds(self, stage: Stage) -> dict[str, list[Window]]:
        """Return the windows of each case, round by round. Every other round goes backwards."""
        cases = (ALONE, HELD, LOADED)
        windows: dict[str, list[Window]] = {name: [] for name in cases}
        try:
            with stage("storing the prompts", _PROMPTS) as advance:
                for each in self._long:
                    ask_all([Due(0.0, self._engine.port, each, 1)])
                    advance()
            # Twice: what a first window finds unprepared is in no round.
            asyncio.run(self._window(LOADED))
            with stage("decoding", self._sizes.rounds * len(cases)) as advance:
                for number in range(self._sizes.rounds):
                    for name in cases[:: -1 if number % 2 else 1]:
                        windows[name].append(asyncio.run(self._window(name)))
                        advance()
        except (OSError, BenchFailed):
            with suppress(OSError):
                time.sleep(1.0)
            self._engine.child.check_alive()
            raise
        return windows

    async def _window(self, name: str) -> Window:
        sizes, port = self._sizes, self._engine.port
        asked: Iterator[bytes] = cycle(self._long if name == LOADED else self._long[:1])
        if name != ALONE:
            # In the engine's cache from here on; or the one before it, which the first of the others pushes out.
            await ask(Due(0.0, port, self._long[0 if name == HELD else -1], 1), time.perf_counter())
        before = self._loaded()
        begin = time.perf_counter()
        due = Due(0.0, port, self._body(sizes.first_tokens, sizes.answer_tokens), sizes.answer_tokens)
        measured = asyncio.ensure_future(ask(due, begin))
        beside: list[tuple[float, Answer]] = []
        while name != ALONE and not measured.done():
            began = time.perf_counter()
            answer = await ask(Due(0.0, port, next(asked), 1), began)
            if not measured.done():
                beside.append((began, answer))
            await asyncio.wait([measured], timeout=max(began + _PERIOD_S - time.perf_counter(), 0.0))
        answer = await measured
        loaded = self._loaded() - before
        if (name == LOADED) != (loaded > 0) or (name != ALONE and not beside):
            raise BenchFailed(f"{name}: {len(beside)} requests were answered, and {loaded} tokens loaded")
        gaps = answer.gaps_s
        if beside:
            waits = [(began, began + each.first_s) for began, each in beside]
            gaps = gaps_within(answer.gaps_s, begin + answer.first_s, waits)
            if not gaps:
                raise BenchFailed(f"{name}: the engine made no token while a request waited", hint="use a larger model")
        return Window(gaps, [each.first_s for _, each in beside], loaded)

    def _body(self, tokens: int, answer_tokens: int) -> bytes:
        prompt: Sequence[int] = [self._random.randrange(_FIRST_TOKEN, self._vocabulary) for _ in range(tokens)]
        # Only the long prompts are stored.
        return body(SERVED, prompt, answer_tokens, **({"kvframework.store": False} if answer_tokens > 1 else {}))

    def _loaded(self) -> int:
        """Return the tokens that the engine says it has loaded so far."""
        connection = http.client.HTTPConnection("127.0.0.1", self._engine.port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            found = _LOADED.findall(connection.getresponse().read())
        finally:
            connection.close()
        return sum(int(float(each)) for each in found)
