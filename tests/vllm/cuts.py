"""Hits that are cut at every chunk, and the tokens that an engine says then.

The server cuts the load of a prompt that a tier has, behind 0, 1, ... chunks; the engine computes the rest. Beside it
the same with nobody's help: an engine whose own prefix cache has as many chunks, of another prompt of the same length
and beginning.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvframework.wire import messages as m
from tests.support.server_process import ServerProcess
from tests.vllm.engine import Ask
from tests.vllm.model import prompt
from tests.vllm.rows import CHUNK, Answer, Bench, written_back

CHUNKS = 8
# The last tokens fill no chunk.
TOKENS = CHUNKS * CHUNK + 52
# What is computed behind a cut may be rounded in another way: every cut is of the KV of the cold answer.
_AS_IT_IS = {"kvframework.store": False}


@dataclass(frozen=True)
class Cut:
    """The answers to one prompt: without a hit, and by the number of chunks hit, from the server and from the engine's
    own cache, 0 to `CHUNKS` of them."""

    cold: Answer
    loaded: Sequence[Answer]
    own: Sequence[Answer]


def cuts(bench: Bench, seeds: Sequence[int]) -> Iterator[Cut]:
    """Two engine processes, one after the other, for all prompts."""
    prompts = [prompt(TOKENS, seed=seed) for seed in seeds]
    with tempfile.TemporaryDirectory(dir=bench.directory, prefix="cuts-") as name:
        loaded = _loaded(bench, prompts, Path(name))
    own = _own(bench, prompts)
    for number in range(len(prompts)):
        first, rest = number * (CHUNKS + 2), number * (CHUNKS + 1)
        yield Cut(loaded[first], loaded[first + 1 : first + CHUNKS + 2], own[rest : rest + CHUNKS + 1])


def _loaded(bench: Bench, prompts: Sequence[list[int]], folder: Path) -> list[Answer]:
    """For each prompt a cold answer, which is stored, and one for each cut."""
    cut, asks, turns = folder / "cut", [], []
    cut.write_text("0")
    for given in prompts:
        asks.append(Ask(given, tokens=bench.new_tokens, reset=True))
        for chunks in range(CHUNKS + 1):
            turns.append((folder / f"go-{len(turns)}", chunks))
            asks.append(Ask(given, tokens=bench.new_tokens, reset=True, params=_AS_IT_IS, wait_file=str(turns[-1][0])))
    disk = ("l2.0.use=filesystem", f"l2.0.path={folder / 'l2'}", "l2.0.capacity=4GiB", "server.price=true")
    program = ("-m", "tests.vllm.cutting_server", str(cut))
    with ServerProcess(f"server.chunk_size={CHUNK}", *disk, capacity="1GiB", program=program) as server:
        waiting = iter(turns)

        def turn() -> None:
            go, chunks = next(waiting)
            written_back(server)
            with server.client() as client:
                assert client.call("CLEAR", m.Clear()).in_use == 0
            cut.write_text(str(chunks * CHUNK))
            go.touch()

        answers = bench.run(server, *asks, on_wait=turn)
        priced = server.status()["price"]
        assert (priced["lookups"], priced["cut"]) == (len(turns), len(prompts) * CHUNKS)
    return answers


def _own(bench: Bench, prompts: Sequence[list[int]]) -> list[Answer]:
    """For each prompt and number of chunks an answer of an engine whose own cache has these. They were computed in a
    prompt of the same length: what is computed beside them may change how they are rounded."""
    asks, others = [], prompt(TOKENS, seed=1 << 30)
    for given in prompts:
        for chunks in range(CHUNKS + 1):
            hit = chunks * CHUNK
            asks.append(Ask(given[:hit] + others[hit:], tokens=1, reset=True))
            asks.append(Ask(given, tokens=bench.new_tokens))
    return bench.run(None, *asks)[1::2]
