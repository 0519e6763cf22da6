"""`python -m kvframework_bench.shards`: what shards cost an engine of fewer ranks than the fleet allows, beside the
same engine at a server without them: processor time of store and load, and bytes that differ.

A rank of Llama-3-8B (32 layers, 8 KV heads of 128 elements, bfloat16) in an engine of `tp` ranks, scattered blocks.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import torch
import typer

from kvframework.client import KVClient, ModelPart, RequestHashes, WorkerAdapter
from kvframework_bench.server import running_server

_LAYERS, _HEADS, _DIM, _BLOCK = 32, 8, 128, 16
_WARM = 3
_FORMS = {
    "tokens first (NHD)": ("plane", "block", "token", "head", "dim"),
    "heads first (HND)": ("plane", "block", "head", "token", "dim"),
}


class _Side:
    """One engine at a server of its own. The same tensors serve all engines."""

    def __init__(self, client: KVClient, kv: dict[str, torch.Tensor], axes: Sequence[str], tp: int) -> None:
        self._client = client
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

    def times(self, seed: int, tokens: int, source: list[int], target: list[int]) -> tuple[float, float]:
        """Seconds of processor time of a store of new tokens, and of their load."""
        request = RequestHashes(self._client.hasher, self._chunk, request_id=str(seed))
        request.extend([seed * tokens + at for at in range(tokens)])
        request.digests(tokens)
        stored = _seconds(lambda: self._worker.submit_store(request, 0, tokens, [source]).result(120).ok)
        return stored, _seconds(lambda: self._worker.submit_retrieve(request, 0, tokens, [target]).result(120).ok)

    def close(self) -> None:
        self._worker.close()


def main(
    tp: Annotated[list[int], typer.Option(help="ranks of the engine")] = [1, 2, 4],  # noqa: B006 - typer copies it
    tp_lcm: int = 8,
    tokens: int = 1024,
    rounds: int = 15,
) -> None:
    """Print a table."""
    typer.echo(f"| TP, shards a rank ({tp_lcm} in all) | layout | store | load |")
    typer.echo("|---|---|---:|---:|")
    for size in tp:
        for name, axes in _FORMS.items():
            stored, loaded = _ratios(size, tp_lcm, axes, tokens, rounds)
            typer.echo(f"| {size}, {max(tp_lcm // size, 1)} | {name} | {stored:.2f} x | {loaded:.2f} x |")


def _ratios(tp: int, tp_lcm: int, axes: Sequence[str], tokens: int, rounds: int) -> tuple[float, float]:
    """The median processor time with shards, as multiples of that without. Raises `SystemExit` for a wrong byte."""
    blocks = tokens // _BLOCK
    sizes = {"plane": 2, "block": 2 * blocks, "token": _BLOCK, "head": _HEADS // tp, "dim": _DIM}
    shape = [sizes[axis] for axis in axes]
    kv = {
        f"layers.{layer}": torch.randint(0, 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)
        for layer in range(_LAYERS)
    }
    ids = random.Random(1).sample(range(2 * blocks), 2 * blocks)
    source, target = ids[:blocks], ids[blocks:]
    # Room for a little more than one request: soon every store writes memory that has been written before.
    capacity = max(sum(tensor.nbytes for tensor in kv.values()) * 3 // 4, 64 << 20)
    with ExitStack() as ends:
        sides = []
        for lcm in (1, tp_lcm):
            directory = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvf-")))
            server = ends.enter_context(running_server(directory, capacity, [f"server.tp_lcm={lcm}"]))
            side = _Side(ends.enter_context(server.client()), kv, axes, tp)
            ends.callback(side.close)
            sides.append(side)
        found: list[list[tuple[float, float]]] = [[], []]
        for number in range(rounds + _WARM):
            for index in (0, 1) if number % 2 else (1, 0):
                times = sides[index].times(number, tokens, source, target)
                if number >= _WARM:
                    found[index].append(times)
                block = axes.index("block")
                for tensor in kv.values():
                    words = tensor.view(torch.int16)
                    if not torch.equal(words.index_select(block, _at(source)), words.index_select(block, _at(target))):
                        raise SystemExit("a byte is wrong")
                    words.index_fill_(block, _at(target), 0)
    plain, split = ([statistics.median(each) for each in zip(*side, strict=True)] for side in found)
    return split[0] / plain[0], split[1] / plain[1]


def _at(blocks: list[int]) -> torch.Tensor:
    return torch.tensor(blocks)


def _seconds(call: Callable[[], bool]) -> float:
    """Processor time of this process, which others do not lengthen."""
    began = time.process_time()
    if not call():
        raise SystemExit("a transfer failed")
    return time.process_time() - began


if __name__ == "__main__":
    typer.run(main)
