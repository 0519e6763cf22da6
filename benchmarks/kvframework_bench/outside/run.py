"""The measurement: in each round every contender gets a new engine, and each tool asks it, one workload after another.

A workload of a tool may ask the same in every round, so no cache outlives a round. The engine computes on half of the
cores; the tools and the servers have the others.
"""

from __future__ import annotations

import http.client
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from kvf_plan.trace.reading import open_trace
from kvframework.api.plugin import ByteSize
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchFailed, BenchUnavailable, Skipped, measure_or_skip
from kvframework_bench.machine import CpuSeconds, available_bytes
from kvframework_bench.outside.aiperf import AIPerf
from kvframework_bench.outside.cells import Cell, Cells, Run, rotated
from kvframework_bench.outside.figures import OutsideFigures, ToolFigures, rows_of
from kvframework_bench.outside.lmcache_bench import LmcacheBench
from kvframework_bench.outside.load import OutsideSizes, trace_lines, write_tokenizer
from kvframework_bench.outside.tools import Target, Tool, Workload
from kvframework_bench.outside.vllm_bench import VllmBench
from kvframework_bench.process import adopting, await_end, running, scratch
from kvframework_bench.serving.asking import Due, ask_all, body
from kvframework_bench.serving.contenders import CONTENDERS, IDEAL, MORE, NONE, OFFLOADING, OURS, PEER, Contender
from kvframework_bench.serving.engines import SERVED, Engine, EngineSettings, family, processor_s, running_engine
from kvframework_bench.serving.load import make_load
from kvframework_bench.serving.model import SUMMARY, VOCABULARY, made_model, read_config
from kvframework_bench.serving.run import Launch, halves

USUAL = (NONE, IDEAL, OURS, OFFLOADING, PEER)
_TOOL_S = 900.0
# What is still being stored when the last answer ends belongs to the cell.
_SETTLE_S = 0.5
_WARM_UP_TOKENS = 1024
_COUNTED = re.compile(
    rb"^vllm:(prompt_tokens_total|request_prefill_kv_computed_tokens_sum)\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE
)


def known_tools(aiperf: Path | None) -> Mapping[str, Tool]:
    """Return the tools by their names; `aiperf` is its command, None for that of the PATH."""
    tools: Sequence[Tool] = (AIPerf(aiperf), VllmBench(), LmcacheBench())
    return {tool.name: tool for tool in tools}


def chosen_contenders(names: Sequence[str]) -> list[Contender]:
    """Return the contenders of these names, without names the usual ones. Raises `BenchUnavailable` for a name that is
    none."""
    known = {each.name: each for each in (*CONTENDERS, *MORE)}
    if unknown := [name for name in names if name not in known]:
        raise BenchUnavailable(f"unknown contender {unknown[0]!r}", where="--contender", available=", ".join(known))
    return [known[name] for name in dict.fromkeys(names or USUAL)]


def bench_outside(
    sizes: OutsideSizes,
    *,
    trace: Path,
    folder: Path,
    tools: Sequence[Tool],
    contenders: Sequence[Contender],
    rounds: int,
    model: Path | None = None,
    stage: Stage = no_progress,
    launch: Launch = running_engine,
) -> OutsideFigures:
    """Measure what `folder` does not have yet; takes six minutes a round with all tools and five contenders. A tool
    and a contender that do not run here are skipped. `model` is a folder with a tokenizer, None for the bench's own.

    Raises `TraceError` for what is no trace, `BenchUnavailable` for a folder of another run, one without a model or
    too little memory, and `BenchFailed`, with the end of its log, for an engine or a tool that ends without a result.
    """
    opened = open_trace(trace)
    asks = make_load(opened, opened.header.chunk_tokens, sizes.shape)
    config = read_config(model) if model is not None else None
    summary = SUMMARY if model is None else model.name
    cells = Cells(folder, Run(sizes, opened.header.name, summary))
    _check_memory(sizes)
    skipped: list[Skipped] = []
    versions: dict[str, str] = {}
    for tool in tools:
        if (version := measure_or_skip(skipped, tool.name, tool.version)) is not None:
            versions[tool.name] = version
    there = [tool for tool in tools if tool.name in versions]
    with scratch() as directory, adopting():
        if model is None:
            model = made_model(directory, "small")
            write_tokenizer(model)
        chunk = max(opened.header.chunk_tokens // sizes.shape.shorter, 1)
        lines = directory / "trace.jsonl"
        lines.write_bytes(b"".join(line + b"\n" for line in trace_lines(asks)))
        vocabulary = config.vocab_size if config is not None else VOCABULARY
        bench = _Bench(sizes, model, vocabulary, lines, chunk, cells, there, versions, launch)
        by_name = {each.name: each for each in contenders}
        with stage("running tools", rounds * len(by_name)) as advance:
            for number in range(rounds):
                for name in rotated(list(by_name), number):
                    place = directory / f"{number}-{list(by_name).index(name)}"
                    if name not in {each.what for each in skipped}:
                        bench.measure(by_name[name], number, place, skipped)
                    advance()
    kept = bench.kept(contenders, rounds)
    return OutsideFigures(
        opened.header.name,
        summary,
        sizes.kv_cache_bytes,
        sizes.capacity_bytes,
        [
            ToolFigures(
                tool.name,
                versions[tool.name],
                tool.differs,
                max((cell.others for cell in kept if cell.tool == tool.name), default=0.0),
            )
            for tool in there
        ],
        rows_of(kept, IDEAL),
        kept,
        skipped,
    )


def _check_memory(sizes: OutsideSizes) -> None:
    # An engine with an endless cache has the capacity itself.
    needed = sizes.engine_bytes + sizes.kv_cache_bytes + sizes.capacity_bytes
    if (there := available_bytes()) < needed:
        raise BenchUnavailable(f"the benchmark needs {ByteSize(needed)} of memory, but {ByteSize(there)} are available")


class _Bench:
    """Runs the cells of one contender after another."""

    def __init__(
        self,
        sizes: OutsideSizes,
        model: Path,
        vocabulary: int,
        trace: Path,
        chunk_tokens: int,
        cells: Cells,
        tools: Sequence[Tool],
        versions: Mapping[str, str],
        launch: Launch,
    ) -> None:
        self._sizes, self._model, self._vocabulary = sizes, model, vocabulary
        self._trace, self._chunk = trace, chunk_tokens
        self._cells, self._tools, self._versions, self._launch = cells, tools, versions, launch

    def measure(self, contender: Contender, number: int, place: Path, skipped: list[Skipped]) -> None:
        """Run what the round still lacks of a contender, if anything, with a new engine."""
        missing = [
            (tool, workload)
            for tool in self._tools
            for workload in tool.workloads()
            if self._cells.finished(number, contender.name, tool.name, workload.name) is None
        ]
        if not missing:
            return
        place.mkdir()
        sizes = self._sizes
        settings = EngineSettings(self._model, sizes.longest, sizes.kv_cache_bytes, tokenizer=True)
        cores = halves(sorted(os.sched_getaffinity(0)))[0]
        with ExitStack() as stack:
            engine: Engine | None = None
            try:
                offload = stack.enter_context(contender.open(place, sizes.capacity_bytes))
                engine = stack.enter_context(self._launch(contender.name, settings, offload.options, cores, place))
                engine.await_answer()
            except BenchUnavailable as error:
                skipped.append(Skipped(contender.name, error.fact, error.hint))
                return
            except BenchFailed as error:
                if contender.needed:
                    raise
                why = (engine.why() if engine is not None else "") or error.fact
                skipped.append(Skipped(contender.name, why, "the contender does not start"))
                return
            prompt = [self._vocabulary - 1 - at % 512 for at in range(_WARM_UP_TOKENS)]
            ask_all([Due(0.0, engine.port, body(SERVED, prompt, 2), 2)] * 2)
            for tool, workload in missing:
                self._cell(contender.name, number, engine, tool, workload)

    def kept(self, contenders: Sequence[Contender], rounds: int) -> list[Cell]:
        """Return the finished cells by tool, workload, contender and round."""
        found = (
            self._cells.finished(number, contender.name, tool.name, workload.name)
            for tool in self._tools
            for workload in tool.workloads()
            for contender in contenders
            for number in range(rounds)
        )
        return [cell for cell in found if cell is not None]

    def _cell(self, contender: str, number: int, engine: Engine, tool: Tool, workload: Workload) -> None:
        place = self._cells.begin(number, contender, tool.name, workload.name)
        target = Target(
            f"http://127.0.0.1:{engine.port}",
            SERVED,
            self._model,
            self._trace,
            self._chunk,
            number,
            place,
            self._sizes,
        )
        command = list(workload.command(target))
        prompt, computed = counted(engine.port)
        cpu, running_s = CpuSeconds.now(), _running_s()
        name = f"{tool.name}, {workload.name}"
        with running(name, command, place, environment=tool.environment(target)) as child:
            await_end(child, _TOOL_S)
            engine.child.check_alive()
            try:
                result = workload.read(place)
            except (OSError, msgspec.MsgspecError) as error:
                raise child.failure(f"has left no result of {contender}: {error}") from error
        if not result.completed:
            raise BenchFailed(f"{name}: no request to {contender} was answered, {result.failed} failed")
        time.sleep(_SETTLE_S)
        after = CpuSeconds.now()
        others = cpu.others_until(after) - (_running_s() - running_s) / (after.at - cpu.at)
        prompt_after, computed_after = counted(engine.port)
        self._cells.finish(
            Cell(
                tool.name,
                self._versions[tool.name],
                workload.name,
                contender,
                number,
                command,
                result,
                prompt_after - prompt,
                computed_after - computed,
                max(others, 0.0),
            )
        )


def _running_s() -> float:
    """Return the processor time of the processes that this one has started and that run now."""
    return sum(map(processor_s, family(os.getpid())[1:]))


def counted(port: int) -> tuple[int, int]:
    """Return the tokens of the prompts that an engine has answered so far, and of these those that it computed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        found = _COUNTED.findall(connection.getresponse().read())
    finally:
        connection.close()
    of = {name: sum(float(value) for each, value in found if each == name) for name, _ in found}
    return int(of.get(b"prompt_tokens_total", 0)), int(of.get(b"request_prefill_kv_computed_tokens_sum", 0))
