"""A model whose KV is known, and engines that hold it split to ranks, behind real workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvframework.api.layout import EngineView
from kvframework.client import KVClient, ModelPart, RequestHashes, WorkerAdapter
from tests.core.layouts.engines import Group, as_bytes, hold
from tests.support.lazy import torch

CHUNK = 32
BLOCK = 16
TOKENS = 2 * CHUNK
SPARE = TOKENS // BLOCK
# What engines have: by token or by head first, planes together or apart, all layers in one tensor, without blocks.
FORMS: dict[str, tuple[str, ...]] = {
    "NHD": ("plane", "block", "token", "head", "dim"),
    "HND": ("block", "plane", "head", "token", "dim"),
    "pairs": ("block", "token", "head", "dim"),
    "page_head": ("plane", "block", "head", "token", "layer", "dim"),
    "flat": ("token", "head", "dim"),
}


@dataclass(frozen=True)
class Model:
    """The KV of a model: `heads` in each of `layers`; one plane is MLA."""

    heads: int = 8
    layers: int = 2
    dim: int = 4
    dtype: str = "bfloat16"
    planes: int = 2
    window: int = 0

    def content(self, seed: int) -> torch.Tensor:
        """`[layer, plane, block, slot, head, dim]` of all tokens and a spare block, random bits."""
        return self._group("NHD").content(SPARE + 1, seed)

    def group(self, form: str, heads: int, layers: int) -> Group:
        return replace(self._group(form), heads=heads, layers=layers)

    def _group(self, form: str) -> Group:
        axes = FORMS[form]
        if self.planes == 1:
            axes = tuple(axis for axis in axes if axis != "plane")
        return Group(
            axes,
            layers=self.layers,
            planes=self.planes,
            heads=self.heads,
            dim=self.dim,
            dtype=self.dtype,
            block_size=BLOCK,
            window=self.window,
        )


class Seen(EngineView):
    """The engine's own access to a block of a rank, by the axes of its tensors."""

    spare_blocks = (SPARE,)

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        return self._rank.view(layer, plane)[block].clone()

    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        self._rank.view(layer, plane)[block] = values


class Rank:
    """One worker of an engine: its heads and layers of the model, in tensors of a form, with a content or zeros."""

    def __init__(
        self,
        client: KVClient,
        instance_id: int,
        model: Model,
        part: ModelPart,
        form: str,
        content: torch.Tensor | None,
        *,
        stage_layers: int,
        path: str = "auto",
        known: bool = True,
    ) -> None:
        self.part, self.form = part, form
        own = max(model.heads // part.tp_size, 1)
        first = part.tp_rank * model.heads // part.tp_size
        self.heads = slice(first, first + own)
        self.layers = slice(part.first_layer, part.first_layer + stage_layers)
        self.group = model.group(form, own, stage_layers)
        mine = torch.zeros_like(model.content(0)) if content is None else content
        self.kv = hold(self.group, mine[self.layers, :, :, :, self.heads].contiguous(), f"{part.first_layer:03}.")
        self.worker = WorkerAdapter(
            client,
            instance_id=instance_id,
            model_name="m",
            world_size=part.tp_size,
            rank=part.tp_rank,
            layout="paged",
            layout_options={"groups": [self.group.table("*", 0)]},
            transport="cpu_gather",
            transport_options={"path": path},
            part=part if known else None,
        )
        self.registration = self.worker.register_kv_caches(self.kv, block_size=BLOCK, view=Seen(self))

    def view(self, layer: int, plane: int) -> torch.Tensor:
        """One plane of one layer, `[block, slot, head, dim]`, from the tensors by their axes."""
        names = list(self.group.axes)
        held = next(iter(self.kv.values())) if "layer" in names else list(self.kv.values())[layer]
        tensor = held[plane] if isinstance(held, tuple) else held
        for axis, index in (("layer", layer), ("plane", plane)):
            if axis in names:
                tensor = tensor.select(names.index(axis), index)
                names.remove(axis)
        if "block" not in names:
            tensor = tensor.unflatten(0, (-1, BLOCK))
            names.insert(0, "block")
        return tensor.permute([names.index(axis) for axis in ("block", "token", "head", "dim")])

    def content(self) -> torch.Tensor:
        """`[layer, plane, block, slot, head, dim]` as the engine has it now, as bytes."""
        layers, planes = range(self.group.layers), range(self.group.planes)
        return as_bytes(torch.stack([torch.stack([self.view(at, plane) for plane in planes]) for at in layers]))

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        return as_bytes(whole[self.layers, :, :, :, self.heads])


def hashed(client: KVClient, tokens: Sequence[int]) -> RequestHashes:
    request = RequestHashes(client.hasher, CHUNK, request_id="r")
    request.extend(tokens)
    return request


class SplitEngine:
    """An engine of `tp` ranks in each of `pp` stages, with a scheduler."""

    def __init__(
        self,
        client: KVClient,
        first_id: int,
        model: Model,
        tp: int,
        *,
        pp: int = 1,
        form: str = "NHD",
        content: torch.Tensor | None = None,
        path: str = "auto",
        known: bool = True,
    ) -> None:
        self.client, self.tp = client, tp
        height = model.layers // pp
        self.ranks = [
            Rank(
                client,
                first_id + stage * tp + rank,
                model,
                ModelPart(model.heads, rank, tp, stage * height, model.layers if pp > 1 else 0),
                form,
                content,
                stage_layers=height,
                path=path,
                known=known,
            )
            for stage in range(pp)
            for rank in range(tp)
        ]
        self.scheduler = self.ranks[0].worker.scheduler()

    def __enter__(self) -> SplitEngine:
        return self

    def __exit__(self, *_exc: object) -> None:
        for rank in self.ranks:
            rank.worker.close()

    def request(self, tokens: Sequence[int]) -> RequestHashes:
        return hashed(self.client, tokens)

    def store(self, tokens: Sequence[int]) -> list[int]:
        """Store by every rank; return how many objects each has stored."""
        futures = [
            rank.worker.submit_store(self.request(tokens), 0, TOKENS, [list(range(SPARE))]) for rank in self.ranks
        ]
        outcomes = [future.result(60) for future in futures]
        assert all(outcome.ok for outcome in outcomes), outcomes
        return [outcome.stored for outcome in outcomes]

    def hit(self, tokens: Sequence[int]) -> int:
        result = self.scheduler.lookup(self.request(tokens))
        self.scheduler.free(result)
        return result.hit_tokens

    def load(self, tokens: Sequence[int], skip: int = 0) -> list[bool]:
        """Load by every rank."""
        futures = [
            rank.worker.submit_retrieve(self.request(tokens), 0, TOKENS, [list(range(SPARE))], skip_first_n_tokens=skip)
            for rank in self.ranks
        ]
        return [future.result(60).ok for future in futures]

    def expect(self, whole: torch.Tensor, skip: int = 0) -> None:
        """Each rank holds its part of the model's KV from token `skip` on, bit by bit; zeros before it."""
        for rank in self.ranks:
            found = rank.content().flatten(2, 3)[:, :, :TOKENS]
            wanted = rank.part_of(whole).flatten(2, 3)[:, :, :TOKENS]
            assert torch.equal(found[:, :, skip:], wanted[:, :, skip:]), (rank.part, rank.form)
            assert not found[:, :, :skip].any()
