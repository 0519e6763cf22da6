"""Objects of equal content are equal whatever the engine's layout, and what is gathered comes back where it belongs.
Hypothesis over the order of axes, planes, layers in one tensor or storage, dtypes, block sizes, compress ratios,
windows, states and skipped tokens, through the real layout plugin and transport. Layouts see memory at an address as
they see torch's tensors of the same memory, in a process that has no torch."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_cpu_gather.kernel import load_kernel
from kvf_dev.testing.transport.engine import CASES, MemoryModel
from kvf_layouts.declaring import OpaqueRule, PagedRule
from kvf_layouts.opaque import OpaqueLayout
from kvf_layouts.paged import PagedLayout
from kvframework.api.keys import compute_namespace
from kvframework.api.layout import NO_BLOCK, MemoryTensor, dtype_name
from kvframework.api.plugin import DTYPE_BYTES
from kvframework.errors import BadDtype
from tests.core.layouts.engines import Engine, Group, as_bytes
from tests.support.lazy import torch
from tests.support.processes import ran

pytestmark = pytest.mark.torch


CHUNK, CHUNKS, SPARE = 24, 3, 2
KERNELS = [None, load_kernel(2)]


@st.composite
def held_alike(draw: st.DrawFn) -> tuple[Group, Group]:
    """One layer group as two engines hold it."""
    planes = draw(st.integers(1, 2))
    state = draw(st.integers(0, 4)) == 0
    heads = draw(st.integers(1, 3))
    block_size = draw(st.sampled_from([1, 2, 4, 8, 12]))
    sizes = {
        "layers": draw(st.integers(1, 3)),
        "planes": planes,
        "heads": heads,
        "dim": draw(st.integers(1, 3)),
        "dtype": draw(st.sampled_from(list(DTYPE_BYTES))),
        "block_size": block_size,
        "compress_ratio": 1 if state else draw(st.sampled_from([r for r in (1, 2, 4) if block_size % r == 0])),
        "window": 0 if state else draw(st.sampled_from([0, 0, 1, 5, 24, 30, 100])),
        "state": state,
    }

    def engine() -> Group:
        axes = ["block", "dim"] if state else ["token", "dim"]
        if not state and draw(st.booleans()):
            axes.append("block")
        if heads > 1 or draw(st.booleans()):
            axes.append("head")
        if planes == 2 and draw(st.booleans()):
            axes.append("plane")
        if draw(st.booleans()):
            axes.append("layer")
        how = draw(st.sampled_from(["own", "offsets", "interleaved"]))
        return Group(tuple(draw(st.permutations(axes))), how=how, **sizes)

    return engine(), engine()


@settings(max_examples=200)
@given(
    pairs=st.lists(held_alike(), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
    skip=st.integers(0, CHUNKS * CHUNK),
    kernel=st.sampled_from(KERNELS),
    data=st.data(),
)
def test_equal_content_is_one_object_and_comes_back(pairs, seed, skip, kernel, data):
    chunk = Engine([one for one, _ in pairs], [one.content(1, seed) for one, _ in pairs], CHUNK).desc.chunk_tokens
    tokens = chunk * CHUNKS
    skip = min(skip, tokens)
    counts = [tokens // one.block_size + SPARE for one, _ in pairs]
    contents = [one.content(count, seed + 1) for (one, _), count in zip(pairs, counts, strict=True)]
    others = [one.content(count, seed + 2) for (one, _), count in zip(pairs, counts, strict=True)]
    source = Engine([one for one, _ in pairs], contents, CHUNK, kernel=kernel)
    target = Engine([other for _, other in pairs], others, CHUNK, link=source.link, kernel=kernel)
    assert source.desc == target.desc
    assert (
        len(
            {
                compute_namespace(model="m", desc=engine.desc, hasher_fingerprint="h", world_size=1)
                for engine in (source, target)
            }
        )
        == 1
    )

    ids = [data.draw(st.permutations(range(count)))[: count - SPARE] for count in counts]
    assert source.store(ids, CHUNKS).result()
    for index, (group, content) in enumerate(zip(source.groups, contents, strict=True)):
        per = 1 if group.state else chunk // group.block_size
        used = ids[index][chunk // group.block_size - 1 :: chunk // group.block_size] if group.state else ids[index]
        for number in range(CHUNKS):
            expected = as_bytes(content)[:, :, used[number * per : (number + 1) * per]]
            assert source.link.object_bytes(bytes([number + 1]) * 32, index) == expected.numpy().tobytes()

    # Other blocks; of a window, any id that does not exist where the window does not reach.
    to = [data.draw(st.permutations(range(count)))[: count - SPARE] for count in counts]
    given_ids = [
        [NO_BLOCK if at < _first_block(group, tokens) else each for at, each in enumerate(group_ids)]
        for group, group_ids in zip(target.groups, to, strict=True)
    ]
    assert target.load(given_ids, CHUNKS, skip).result()
    for index, group in enumerate(target.groups):
        assert torch.equal(
            target.blocks(index), _expected(group, contents[index], others[index], ids[index], to[index], chunk, skip)
        )


def _first_block(group: Group, tokens: int) -> int:
    if group.state:
        return tokens // group.block_size - 1
    return max(tokens - group.window, 0) // group.block_size if group.window else 0


def _expected(group, content, before, ids, to, chunk, skip):
    """Slot by slot, from the definition: a slot is loaded if it holds a token that is not skipped, in a block that the
    window reaches."""
    want, have = as_bytes(before).clone(), as_bytes(content)
    tokens = chunk * CHUNKS
    for at, (source, target) in enumerate(zip(ids, to, strict=True)):
        if at < _first_block(group, tokens):
            continue
        for slot in range(group.slots):
            width = group.block_size // group.slots
            last_token = at * group.block_size + (slot + 1) * width - 1
            if last_token >= skip:
                want[:, :, target, slot] = have[:, :, source, slot]
    return want


@settings(max_examples=40)
@given(pair=held_alike(), seed=st.integers(0, 2**16))
def test_strides_are_declared_from_the_tensors(pair, seed):
    group, _ = pair
    engine = Engine([group], [group.content(24, seed)], CHUNK)
    (declared,) = engine.declared.groups
    tensor = next(iter(engine.kv.values()))
    tensor = tensor[0] if isinstance(tensor, tuple) else tensor
    assert declared.strides == tensor.stride()
    assert declared.axes == group.axes
    assert engine.declared.num_blocks == 24


BLOCKS, FIRST = 16, 1 << 20


def seen(name: str, *, by_torch: bool) -> list[object]:
    """Describe the engine of a case; return the declaration, and each view with its distance from the first tensor."""
    groups, caches, at = CASES[name], dict[str, Any](), FIRST
    model = MemoryModel(groups, [BLOCKS] * len(groups), 1)
    memory = torch.zeros(1 << 20, dtype=torch.uint8) if by_torch else None
    for (index, layer, plane), shape in model.shapes.items():
        tensor = MemoryTensor(at, shape, groups[index].dtype)
        at += tensor.nbytes
        if memory is not None:
            piece = memory[tensor.address - FIRST : at - FIRST]
            tensor = piece.view(getattr(torch, tensor.dtype)).view(shape)
        key = f"g{index}.{layer}"
        caches[key] = tensor if plane < 0 or groups[index].planes == 1 else (*caches.get(key, ()), tensor)
    tables = [group.table(f"g{index}.*", index) for index, group in enumerate(groups)]
    rules = msgspec.convert(tables, list[OpaqueRule] if groups[0].opaque else list[PagedRule])
    layout = OpaqueLayout("test/1", rules=rules) if groups[0].opaque else PagedLayout(rules=rules)
    declared = layout.describe(caches, block_size=groups[0].block_size)
    origin = memory.data_ptr() if memory is not None else FIRST
    views = [view for planes in layout.block_views(declared, caches) for plane in planes for view in plane]
    places = [(each.data_ptr() - origin, tuple(each.shape), each.stride(), dtype_name(each)) for each in views]
    return [repr(declared), places]


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(CASES))
def test_it_is_seen_as_a_tensor_of_torch(name: str) -> None:
    assert seen(name, by_torch=False) == seen(name, by_torch=True)


def test_a_process_without_torch_describes_the_same() -> None:
    program = f"""
import sys; sys.modules["torch"] = None
from {__name__} import CASES, seen
print({{name: seen(name, by_torch=False) for name in CASES}})"""
    done = ran(sys.executable, "-c", program, cwd=Path(__file__).parents[3])
    assert ast.literal_eval(done.stdout) == {name: seen(name, by_torch=False) for name in CASES}


def test_a_dtype_that_no_layout_declares_is_refused() -> None:
    with pytest.raises(BadDtype, match="unknown dtype 'half'"):
        MemoryTensor(FIRST, (2, 3), "half")
