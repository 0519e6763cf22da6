"""The declaration of vLLM's KV memory to the framework: layer groups, block tables, and the form `opaque`, in which
blocks stay unchanged under a name for everything that two engines must share to read each other's. Pure, by vLLM's own
names; nothing is guessed from shapes. `canonical` has the other form."""

from __future__ import annotations

import glob
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvf_vllm.step_messages import GroupBlocks
from kvframework.api.layout import NO_BLOCK, KVLayout, LayerTensors
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch


# vLLM's block pool never hands out this block: it takes the place of a block that a window has freed.
NULL_BLOCK = 0
# The order of bytes inside a block that the supported releases of vLLM use.
_ERA = "vllm1"


@dataclass(frozen=True)
class GroupFacts:
    """One KV cache group of vLLM: layers under one block table. `window` is the number of tokens before a position that
    are needed there (one less than vLLM's, which counts the position itself), 0 for all. `state`: a block holds the
    recurrent state after its last token, and few blocks are kept."""

    layers: tuple[str, ...]
    block_size: int
    window: int = 0
    state: bool = False


@dataclass(frozen=True)
class OpaqueBlocks:
    """Blocks in the form in which vLLM keeps them in memory. `packing` is part of the namespace, `layout` the name of
    the layout plugin, `options` and `tensors` are its input."""

    packing: str
    layout: str = "opaque"

    def options(self, groups: Sequence[GroupFacts]) -> dict[str, object]:
        # With states the chunk is vLLM's own step between two prefixes that it can use.
        chunk = math.lcm(*(group.block_size for group in groups)) if any(group.state for group in groups) else 0
        return {"packing": self.packing, "groups": group_rules(groups, block_axis=0), "chunk_tokens": chunk}

    def tensors(
        self, groups: Sequence[GroupFacts], kv_caches: Mapping[str, torch.Tensor], num_blocks: int
    ) -> dict[str, LayerTensors]:
        return dict(block_tensors(groups, kv_caches, num_blocks))


def packing_name(
    backend: str, isa: str, dtype: str, block_size: int, facts: Mapping[str, object], *, release: str = ""
) -> str:
    """Names the order of bytes inside a block. `facts` are all further facts that it depends on: cache layout, and of
    each layer heads, head sizes, quantisation and so on. A vLLM that is not supported names its `release`: its order
    may be another one."""
    text = json.dumps(facts, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"kvf-vllm-pack").hexdigest()
    era = f"{_ERA}@{release}" if release else _ERA
    return "/".join((era, backend, *([isa] if isa else []), dtype, f"b{block_size}", digest))


def group_rules(groups: Sequence[GroupFacts], **more: object) -> list[dict[str, object]]:
    """The option `groups` of a layout plugin. A pipeline stage may have no layer of a group."""
    return [
        {
            "layers": [glob.escape(layer) for layer in group.layers],
            "block_size": group.block_size,
            "window": group.window,
            "state": group.state,
            **more,
        }
        for group in groups
        if group.layers
    ]


def block_tensors(
    groups: Sequence[GroupFacts], kv_caches: Mapping[str, torch.Tensor], num_blocks: int
) -> dict[str, torch.Tensor]:
    """The layers' tensors, group by group, with vLLM's blocks on the first axis: views, where a backend splits blocks
    into smaller ones. Layers that use the KV of another are left out.

    Raises `BadLayout` for a layer that is missing, or whose blocks are not vLLM's.
    """
    found: dict[str, torch.Tensor] = {}
    for group in groups:
        places = set()
        for name in group.layers:
            tensor = kv_caches.get(name)
            if tensor is None:
                raise BadLayout(f"vLLM gave no KV tensor for layer {name}", available=", ".join(list(kv_caches)[:8]))
            if not num_blocks or tensor.shape[0] % num_blocks:
                raise BadLayout(
                    f"the first axis of shape {tuple(tensor.shape)} does not count blocks",
                    where=f"layer {name}",
                    available=f"a multiple of {num_blocks} blocks",
                )
            place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
            if place in places:
                continue
            places.add(place)
            split = tensor.shape[0] // num_blocks
            found[name] = tensor if split == 1 else tensor.unflatten(0, (num_blocks, split))  # type: ignore[no-untyped-call]
    return found


def group_of_each(layout: KVLayout, groups: Sequence[GroupFacts]) -> tuple[int, ...]:
    """For each layer group of the registered layout the KV cache group of vLLM that it belongs to: layers of one group
    that differ in size are several layer groups with one block table."""
    by_layer = {name: index for index, group in enumerate(groups) for name in group.layers}
    return tuple(by_layer[group.layer_names[0]] for group in layout.groups)


def only_between_steps(groups: Sequence[GroupFacts]) -> bool:
    """True if only the request can be named to vLLM when a load fails, which vLLM takes for loads between steps: with
    several groups, and with windows or states. Their tables name the null block, which all requests share, and vLLM
    frees the blocks before a window when it plans the load: the request has to start from its first token."""
    return len(groups) > 1 or any(group.window or group.state for group in groups)


def whole_prompt_loadable(groups: Sequence[GroupFacts]) -> bool:
    """True if KV of a whole prompt is useful: vLLM then computes the last token again, and a window may have freed
    blocks that this token attends to; a state has passed it already."""
    return not any(group.window or group.state for group in groups)


def blocks_between(groups: Sequence[GroupFacts], table: GroupBlocks, start: int, end: int) -> list[list[int]]:
    """The block ids of tokens `[start, end)`, which are multiples of every block size."""
    return [
        list(ids[start // group.block_size : end // group.block_size]) for group, ids in zip(groups, table, strict=True)
    ]


def storable(
    groups: Sequence[GroupFacts], block_ids: list[list[int]], tokens: int, states: Mapping[int, int]
) -> list[list[int]] | None:
    """`block_ids` with `NO_BLOCK` for blocks that a window has freed; None if the table does not cover all `tokens`, or
    a block is missing where all are needed. `states` has the block of each state after the last token, by group: what
    stands in the table of a state may be another one by now."""
    found = []
    for index, (group, ids) in enumerate(zip(groups, block_ids, strict=True)):
        if group.state:
            found.append([NO_BLOCK] * (tokens // group.block_size - 1) + [states.get(index, NO_BLOCK)])
            continue
        if len(ids) * group.block_size != tokens or (not group.window and NULL_BLOCK in ids):
            return None
        found.append([NO_BLOCK if block == NULL_BLOCK else block for block in ids])
    return found


# vLLM's words: the KV cache group, the block that holds the state, the number of tokens that the state has seen.
Handover = tuple[int, int, int]


def complete_states(groups: Sequence[GroupFacts], handed: Iterable[Handover]) -> Mapping[int, Mapping[int, int]]:
    """By number of tokens, the block of each group's state; only where no group lacks its state."""
    recurrent = {index for index, group in enumerate(groups) if group.state}
    found: dict[int, dict[int, int]] = {}
    for group, block, tokens in handed:
        if group in recurrent and block != NULL_BLOCK:
            found.setdefault(tokens, {})[group] = block
    return {tokens: blocks for tokens, blocks in found.items() if blocks.keys() == recurrent}
