"""The measurement: engines of all contenders at once, and one load for each of them in turn, round by round.

Idle engines take a hundredth of a core, so all are there from the beginning, and a round has every contender. Each
round has other tokens, so that nothing of one is a hit in the next; the arithmetic of lengths is the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import eq
from pathlib import Path

import msgspec

from kvf_plan.trace.reading import open_trace
from kvframework.api.plugin import ByteSize
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchFailed, BenchUnavailable, Skipped
from kvframework_bench.machine import available_bytes
from kvframework_bench.process import adopting, scratch
from kvframework_bench.serving.asking import Answer, Due, ask_all, body
from kvframework_bench.serving.connector_time import ConnectorTime
from kvframework_bench.serving.contenders import CONTENDERS, IDEAL, NONE, Contender, Offload
from kvframework_bench.serving.engines import SERVED, Engine, EngineSettings, family, processor_s, running_engine
from kvframework_bench.serving.figures import LoadFigures, Replay, ServingFigures, Unequal, rows_of
from kvframework_bench.serving.load import Ask, LoadShape, Piece, make_load, shared_tokens, token_ids
from kvframework_bench.serving.model import SUMMARY, VOCABULARY, made_model, read_config

_WARM_UP_TOKENS, _WARM_UP_SEED = 1024, -1
# What is still being stored when the last answer ends counts, too.
_SETTLE_S = 0.5
_END_S = 3.0


class ServingSizes(msgspec.Struct, frozen=True):
    """`kv_cache_bytes` of each engine and `capacity_bytes` of what is beside it; `rounds` of every contender with each
    number of `engines`. An engine takes about `engine_bytes` of memory besides. `restarts`: after half of the requests
    the engines of every contender but the ideal one end and start again; the time of that is not counted.

    The KV cache of an engine has room for the two longest requests of `FULL`. With less room requests wait for blocks,
    which those of an ideal engine never do; with twice as much the engine's own cache finds nearly all that an ideal
    one does."""

    shape: LoadShape
    rounds: int
    restarts: bool = False
    engines: tuple[int, ...] = (1, 2)
    kv_cache_bytes: int = 33 << 20
    capacity_bytes: int = 1 << 30
    engine_bytes: int = 1 << 30


FULL = ServingSizes(LoadShape(requests=60, seconds=75), rounds=3)
QUICK = ServingSizes(LoadShape(requests=12, seconds=4), rounds=1)

# Starts an engine, as `running_engine` does.
Launch = Callable[[str, EngineSettings, Sequence[str], Sequence[int], Path], AbstractContextManager[Engine]]


@dataclass
class _Running:
    """A contender with its engines, and what starts as many new ones."""

    name: str
    offload: Offload
    engines: list[Engine]
    start: Callable[[], list[Engine]]

    def restart(self) -> None:
        """End the engines, if there are any, and start new ones. Waits until these answer. Raises `BenchFailed`."""
        for engine in self.engines:
            engine.stop()
        self.engines = self.start()
        for engine in self.engines:
            engine.await_answer()

    def engine_s(self) -> float:
        return sum(engine.processor_s() for engine in self.engines)

    def connector_time(self) -> ConnectorTime | None:
        noted = [each for engine in self.engines if (each := engine.connector_time()) is not None]
        return ConnectorTime.sum_of(noted) if noted else None

    def server_s(self) -> float:
        server = self.offload.server
        return sum(map(processor_s, family(server.pid))) if server is not None else 0.0


def bench_serving(
    sizes: ServingSizes,
    *,
    trace: Path,
    model: Path | None = None,
    stage: Stage = no_progress,
    contenders: Sequence[Contender] = CONTENDERS,
    launch: Launch = running_engine,
) -> ServingFigures:
    """Measure; takes ten minutes. `model` is a folder, None for the bench's own.

    Raises `TraceError` for what is no trace, `BenchUnavailable` for a folder without a model or too little memory, and
    `BenchFailed`, with the end of its log, for an engine that does not start or ends.
    """
    opened = open_trace(trace)
    asks = make_load(opened, opened.header.chunk_tokens, sizes.shape)
    config = read_config(model) if model is not None else None
    longest = sizes.shape.longest + sizes.shape.longest_answer
    if config is not None and config.max_position_embeddings < longest:
        raise BenchUnavailable(
            f"the model's prompts have at most {config.max_position_embeddings} tokens",
            where=f"--model {model}",
            available=f"{longest} tokens",
        )
    _check_memory(sizes, len(contenders))
    with scratch() as directory, adopting(), ExitStack() as stack:
        if model is None:
            model = made_model(directory, "small")
        settings = EngineSettings(model, longest, sizes.kv_cache_bytes)
        skipped: list[Skipped] = []
        with stage("starting engines", len(contenders)) as advance:
            running = _started(contenders, sizes, settings, directory, launch, stack, skipped, advance)
        bodies = _Bodies(asks, config.vocab_size if config else VOCABULARY)
        replays = _rounds(running, asks, bodies, sizes, stage)
    load = LoadFigures(
        trace=opened.header.name,
        requests=len(asks),
        conversations=len({ask.conversation for ask in asks}),
        seconds=sizes.shape.seconds,
        prompt_tokens=sum(ask.prompt_tokens for ask in asks),
        answer_tokens=sum(ask.answer_tokens for ask in asks),
        shared=shared_tokens(asks) / sum(ask.prompt_tokens for ask in asks),
        model=SUMMARY if config is None else model.name,
        kv_cache_bytes=sizes.kv_cache_bytes,
        capacity_bytes=sizes.capacity_bytes,
        restarted=sizes.restarts,
        cores=len(os.sched_getaffinity(0)),
    )
    return ServingFigures(load, rows_of(replays, NONE, IDEAL), skipped)


def _check_memory(sizes: ServingSizes, contenders: int) -> None:
    engines = contenders * max(sizes.engines)
    needed = engines * (sizes.engine_bytes + sizes.kv_cache_bytes) + contenders * sizes.capacity_bytes
    if (there := available_bytes()) < needed:
        raise BenchUnavailable(
            f"{engines} engines and their servers need {ByteSize(needed)} of memory, of {ByteSize(there)} available"
        )


def _started(
    contenders: Sequence[Contender],
    sizes: ServingSizes,
    settings: EngineSettings,
    directory: Path,
    launch: Launch,
    stack: ExitStack,
    skipped: list[Skipped],
    advance: Callable[[], None],
) -> list[_Running]:
    """Return the contenders whose engines answer; the reasons of the others are added to `skipped`. Those of one start
    together: all at once take longer than an engine's patience where there are few cores."""
    answering = []
    for number, contender in enumerate(contenders):
        place = directory / str(number)
        place.mkdir()
        own = stack.enter_context(ExitStack())
        each: _Running | None = None
        try:
            offload = own.enter_context(contender.open(place, sizes.capacity_bytes))
            started = partial(_engines, own, contender.name, settings, offload, place, launch, max(sizes.engines))
            each = _Running(contender.name, offload, [], started)
            each.restart()
        except BenchUnavailable as error:
            skipped.append(Skipped(contender.name, error.fact, error.hint))
            own.close()
        except BenchFailed as error:
            if contender.needed:
                raise
            why = next(filter(None, (engine.why() for engine in (each.engines if each else ()))), error.fact)
            skipped.append(Skipped(contender.name, why, "the contender's engine does not start"))
            own.close()
        else:
            answering.append(each)
        advance()
    return answering


def _engines(
    stack: ExitStack, name: str, settings: EngineSettings, offload: Offload, place: Path, launch: Launch, engines: int
) -> list[Engine]:
    """Return so many new engines of a contender, which end with the stack."""
    return [
        stack.enter_context(launch(f"{name}, engine {index + 1}", settings, offload.options, cores, place))
        for index, cores in enumerate(halves(sorted(os.sched_getaffinity(0)))[:engines])
    ]


def halves(cores: Sequence[int]) -> list[Sequence[int]]:
    """Return the cores of each engine; of a single core, twice that one."""
    half = len(cores) // 2
    return [cores[:half] or cores, cores[half:]]


class _Bodies:
    """The requests of a replay, encoded before its time begins."""

    def __init__(self, asks: Sequence[Ask], vocabulary: int) -> None:
        self._asks = asks
        self._vocabulary = vocabulary

    def of_round(self, seed: int) -> list[bytes]:
        return [body(SERVED, self.prompt(ask, seed), ask.answer_tokens) for ask in self._asks]

    def prompt(self, ask: Ask, seed: int) -> list[int]:
        return token_ids(ask, seed=seed, vocabulary=self._vocabulary)

    def warm_up(self) -> bytes:
        """Return a request of other tokens than all rounds."""
        ask = Ask(0.0, 0, 0, (Piece(0, _WARM_UP_TOKENS),), 2)
        return body(SERVED, self.prompt(ask, _WARM_UP_SEED), ask.answer_tokens)


def _rounds(
    running: Sequence[_Running], asks: Sequence[Ask], bodies: _Bodies, sizes: ServingSizes, stage: Stage
) -> dict[tuple[int, str], list[Replay]]:
    """Return the replays of each case, round by round. Every other round goes backwards."""
    for each in running:
        _warm_up(each, bodies)
    replays: dict[tuple[int, str], list[Replay]] = {
        (engines, each.name): [] for engines in sizes.engines for each in running
    }
    with stage("replaying the load", sizes.rounds * len(replays)) as advance:
        for number in range(sizes.rounds):
            for engines in sizes.engines:
                encoded = bodies.of_round(number * 2 + engines)
                done: dict[str, tuple[Replay, list[Answer]]] = {}
                for each in running[:: -1 if number % 2 else 1]:
                    done[each.name] = _replay(each, asks, encoded, engines, bodies if sizes.restarts else None)
                    advance()
                expected = done[NONE][1]
                for name, (replay, answers) in done.items():
                    unequal = _unequal(number, asks, answers, expected)
                    equal = 1 - len(unequal) / len(asks)
                    replays[engines, name].append(msgspec.structs.replace(replay, equal=equal, unequal=unequal))
    return replays


def _warm_up(contender: _Running, bodies: _Bodies) -> None:
    for engine in contender.engines:
        _answers(contender, [Due(0.0, engine.port, bodies.warm_up(), 2)] * 2)


def _unequal(number: int, asks: Sequence[Ask], answers: Sequence[Answer], expected: Sequence[Answer]) -> list[Unequal]:
    """Return the answers of this round that have other tokens than expected."""
    return [
        Unequal(number, ask.conversation, ask.turn, sum(takewhile(bool, map(eq, mine.tokens, theirs.tokens))))
        for ask, mine, theirs in zip(asks, answers, expected, strict=True)
        if mine.tokens != theirs.tokens
    ]


def _replay(
    contender: _Running, asks: Sequence[Ask], encoded: Sequence[bytes], engines: int, restarts: _Bodies | None
) -> tuple[Replay, list[Answer]]:
    """Replay the load with so many engines. Each turn of a conversation goes to the engine after that of the turn
    before it: what an engine has itself helps the fewest. `restarts`: new engines, which these warm up, answer the
    second half of the requests."""
    half = len(asks) // 2 if restarts is not None else len(asks)
    answers: list[Answer] = []
    seconds = engine_s = server_s = 0.0
    connector: list[float] | None = None
    for part in filter(len, (range(half), range(half, len(asks)))):
        if part.start and restarts is not None and contender.name != IDEAL:
            contender.restart()
            _warm_up(contender, restarts)
        ports = [engine.port for engine in contender.engines[:engines]]
        dues = [
            Due(
                asks[at].at - asks[part.start].at,
                ports[(asks[at].conversation + asks[at].turn) % engines],
                encoded[at],
                asks[at].answer_tokens,
            )
            for at in part
        ]
        engine_s -= contender.engine_s()
        server_s -= contender.server_s()
        before = contender.connector_time()
        answered, took = _answers(contender, dues)
        time.sleep(_SETTLE_S)
        answers += answered
        seconds += took
        engine_s += contender.engine_s()
        server_s += contender.server_s()
        after = contender.connector_time()
        if before is not None and after is not None:
            connector = [had + b - a for had, a, b in zip(connector or [0.0] * 3, before, after, strict=True)]
    processor_ms, scheduler_ms, clock_ms = [1000 * s / len(asks) for s in connector] if connector else [None] * 3
    replay = Replay(
        first_ms=[1000 * answer.first_s for answer in answers],
        later_ms=[1000 * answer.first_s for ask, answer in zip(asks, answers, strict=True) if ask.turn],
        tokens_s=sum(ask.answer_tokens for ask in asks) / seconds,
        hit=sum(answer.cached for answer in answers) / sum(answer.prompt for answer in answers),
        engine_ms=1000 * engine_s / len(asks),
        connector_ms=processor_ms,
        scheduler_ms=scheduler_ms,
        scheduler_clock_ms=clock_ms,
        server_ms=1000 * server_s / len(asks),
        equal=0.0,
    )
    return replay, answers


def _answers(contender: _Running, dues: Sequence[Due]) -> tuple[list[Answer], float]:
    """See `ask_all`. An engine that has ended meanwhile is the error, with the end of its log."""
    try:
        return ask_all(dues)
    except (OSError, BenchFailed) as error:
        # Its connections end before the process does.
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            for engine in contender.engines:
                engine.child.check_alive()
            time.sleep(0.01)
        raise BenchFailed(f"{contender.name}: {error}") from error
