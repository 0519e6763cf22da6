"""The measurement: a rank of Llama-3-8B (32 layers, 8 KV heads of 128 elements, bfloat16) stores and loads scattered
blocks over shared memory, at a server with `tp_lcm` and at one without, in turn. Imports torch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import gcd

import msgspec
import torch

from kvframework.client import KVClient, ModelPart, RequestHashes, WorkerAdapter
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchFailed, WrongBytes
from kvframework_bench.process import scratch
from kvframework_bench.rounds import ratio
from kvframework_bench.server import running_server
from kvframework_bench.shards.figures import TARGET, ShardsFigures, ShardsRow

_LAYERS, _HEADS, _DIM, _BLOCK = 32, 8, 128, 16
_WARM, _CALLS = 3, 3
_PATIENCE_S = 120
LAYOUTS = {
    "tokens first (NHD)": ("plane", "block", "token", "head", "dim"),
    "heads first (HND)": ("plane", "block", "head", "token", "dim"),
}


class ShardsSizes(msgspec.Struct, frozen=True):
    """`sizes` are the engine's ranks, `tokens` those of a request."""

    sizes: tuple[int, ...]
    tp_lcm: int
    tokens: int
    rounds: int


FULL = ShardsSizes((1, 2, 4, 8), 8, 1024, 25)
QUICK = ShardsSizes((4,), 8, 256, 1)


def bench_shards(sizes: ShardsSizes, *, stage: Stage = no_progress) -> ShardsFigures:
    """Measure; takes some seconds for a row. Raises `BenchFailed`, also for a size that does not divide `tp_lcm`."""
    rows = []
    with stage("shards", len(sizes.sizes) * len(LAYOUTS)) as advance:
        for tp in sizes.sizes:
            if sizes.tp_lcm % tp or _HEADS % tp:
                hint = f"choose divisors of --tp-lcm, {sizes.tp_lcm}, and of the {_HEADS} KV heads"
                raise BenchFailed(f"an engine of {tp} ranks holds no whole shards", where="--tp", hint=hint)
            for name, axes in LAYOUTS.items():
                rows.append(_row(tp, name, axes, sizes))
                advance()
    return ShardsFigures(sizes.tp_lcm, sizes.tokens, sizes.rounds, TARGET, rows)


def _row(tp: int, name: str, axes: Sequence[str], sizes: ShardsSizes) -> ShardsRow:
    kv = _tensors(tp, axes, 2 * sizes.tokens // _BLOCK)
    # Room for a little more than one request: soon every store writes memory that has been written before.
    capacity = max(sum(tensor.nbytes for tensor in kv.values()) * 3 // 4, 64 << 20)
    stored: list[list[list[float]]] = [[], []]
    loaded: list[list[list[float]]] = [[], []]
    with ExitStack() as ends:
        sides = []
        for lcm in (1, sizes.tp_lcm):
            directory = ends.enter_context(scratch())
            server = ends.enter_context(running_server(directory, capacity, [f"server.tp_lcm={lcm}"]))
            side = _Side(ends.enter_context(server.client()), kv, axes, tp, sizes.tokens)
            ends.callback(side.close)
            sides.append(side)
        last = sizes.rounds + _WARM - 1
        for number in range(last + 1):
            for index in (0, 1) if number % 2 else (1, 0):
                if number in (0, last):
                    sides[index].erase()
                times = [sides[index].times(number * _CALLS + call) for call in range(_CALLS)]
                if number in (0, last):
                    sides[index].verify()
                if number >= _WARM:
                    stored[index].append([store for store, _ in times])
                    loaded[index].append([load for _, load in times])
    store, load = ratio(stored[1], stored[0]), ratio(loaded[1], loaded[0])
    return ShardsRow(tp, gcd(sizes.tp_lcm, _HEADS) // tp, name, store, load)


def _tensors(tp: int, axes: Sequence[str], blocks: int) -> dict[str, torch.Tensor]:
    sizes = {"plane": 2, "block": blocks, "token": _BLOCK, "head": _HEADS // tp, "dim": _DIM}
    shape = [sizes[axis] for axis in axes]
    return {
        f"layers.{layer}": torch.randint(0, 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)
        for layer in range(_LAYERS)
    }


class _Side:
    """One engine at a separate server. The same tensors serve all engines: a request is stored from the source
    blocks and loaded into the target blocks."""

    def __init__(
        self, client: KVClient, kv: dict[str, torch.Tensor], axes: Sequence[str], tp: int, tokens: int
    ) -> None:
        self._client, self._tokens = client, tokens
        self._words = [tensor.view(torch.int16) for tensor in kv.values()]
        self._block = axes.index("block")
        blocks = tokens // _BLOCK
        ids = random.Random(1).sample(range(2 * blocks), 2 * blocks)
        self._source, self._target = ids[:blocks], ids[blocks:]
        self._worker = WorkerAdapter(
            client,
            instance_id=1,
            model_name="bench",
            world_size=tp,
            transport="cpu_gather",
            layout_options={"axes": list(axes)},
            part=ModelPart(_HEADS, 0, tp),
        )
        self._chunk = self._worker.register_kv_caches(kv, block_size=_BLOCK).desc.chunk_tokens

    def times(self, seed: int) -> tuple[float, float]:
        """Return the seconds of processor time of a store of new tokens, and of their load."""
        tokens = self._tokens
        request = RequestHashes(self._client.hasher, self._chunk, request_id=str(seed))
        request.extend([seed * tokens + at for at in range(tokens)])
        request.digests(tokens)
        store, load = self._worker.submit_store, self._worker.submit_retrieve
        stored = _seconds(lambda: store(request, 0, tokens, [self._source]).result(_PATIENCE_S).ok)
        return stored, _seconds(lambda: load(request, 0, tokens, [self._target]).result(_PATIENCE_S).ok)

    def erase(self) -> None:
        for words in self._words:
            words.index_fill_(self._block, torch.tensor(self._target), 0)

    def verify(self) -> None:
        """Compare what was loaded. Raises `WrongBytes`."""
        source, target = torch.tensor(self._source), torch.tensor(self._target)
        for words in self._words:
            if not torch.equal(words.index_select(self._block, source), words.index_select(self._block, target)):
                raise WrongBytes("a loaded byte differs from the stored byte", where="shards")

    def close(self) -> None:
        self._worker.close()


def _seconds(call: Callable[[], bool]) -> float:
    """Return the processor time of this process, which others do not lengthen."""
    began = time.process_time()
    if not call():
        raise BenchFailed("a store or load failed", where="shards")
    return time.process_time() - began
