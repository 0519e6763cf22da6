"""The recurrent states that vLLM hands over, once a step: where a request's store can end with all of them. Pure.

A state's place in the block table says nothing: vLLM computes on in the last block, and gives passed ones away. The
scheduler names those that it keeps, in the step whose forward pass completes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvf_vllm.layouts import NULL_BLOCK, GroupFacts

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
