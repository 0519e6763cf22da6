"""The split of a model to shards: pure."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.keys import compute_namespace
from kvframework.api.layout import KVLayout, LayerGroup, canonical_desc
from kvframework.client.shards import ModelPart, Shards, shards_of
from kvframework.errors import BadLayout

CHUNK = 32


def layout(heads: int, layers: int, **fields: object) -> KVLayout:
    group = LayerGroup(layers, 16, heads, 4, "float16", layer_names=tuple(f"l.{index}" for index in range(layers)))
    return KVLayout("paged", (msgspec.structs.replace(group, **fields),), 8)


def split(part: ModelPart, held: KVLayout, tp_lcm: int = 8, pp_lcm: int = 1) -> Shards:
    return shards_of(held, canonical_desc(held, CHUNK), part, tp_lcm=tp_lcm, pp_lcm=pp_lcm)


def holds(shards: Shards, part: ModelPart, heads: int, layers: int) -> dict[int, set[tuple[int, int]]]:
    """The (layer, head) of the whole model that each shard of an instance holds, by the shard's number."""
    first = part.tp_rank * part.kv_heads // part.tp_size
    found = {}
    for index, rank in enumerate(shards.ranks):
        row, column = divmod(index, shards.columns)
        height = shards.layers or layers
        found[rank] = set(
            product(
                range(part.first_layer + row * height, part.first_layer + (row + 1) * height),
                range(first + column * shards.heads, first + (column + 1) * shards.heads),
            )
        )
    assert {each for held in found.values() for each in held} == set(
        product(range(part.first_layer, part.first_layer + layers), range(first, first + heads))
    ), "all of the instance, nothing else"
    return found


@given(data=st.data())
def test_a_shard_is_the_same_part_of_the_model_whoever_holds_it(data: st.DataObject) -> None:
    kv_heads, tp_lcm = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32])), data.draw(st.integers(1, 24))
    layers, pp_lcm = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 8))
    known: dict[int, set[tuple[int, int]]] = {}
    names = set()
    sizes = [size for size in range(1, tp_lcm + 1) if tp_lcm % size == 0]
    sizes = [size for size in sizes if kv_heads % size == 0 or size % kv_heads == 0]
    stages = [count for count in range(1, pp_lcm + 1) if pp_lcm % count == 0 and layers % count == 0]
    for size, count in product(sizes, stages):
        seen: set[int] = set()
        for rank, stage in product(range(size), range(count)):
            height, own = layers // count, max(kv_heads // size, 1)
            part = ModelPart(kv_heads, rank, size, stage * height, layers)
            held = layout(own, height, layer_names=tuple(f"l.{stage * height + index}" for index in range(height)))
            try:
                shards = split(part, held, tp_lcm, pp_lcm)
            except BadLayout as error:
                if "more than" not in error.fact:
                    raise
                return
            seen |= set(shards.ranks)
            for number, content in holds(shards, part, own, height).items():
                assert known.setdefault(number, content) == content
            whole = shards.layout(held)
            assert len(whole.groups) == len(shards.ranks)
            desc = canonical_desc(whole, CHUNK)
            assert len(set(desc.groups)) == 1
            assert desc.nbytes == canonical_desc(held, CHUNK).nbytes
            one = msgspec.structs.replace(desc, groups=desc.groups[:1])
            names.add(
                compute_namespace(
                    model="m", desc=one, hasher_fingerprint="h", world_size=shards.world_size, split=shards.split
                )
            )
        assert seen == set(range(shards.world_size)), "the ranks of an engine hold every shard"
    assert len(names) == 1


@pytest.mark.parametrize(
    ("part", "held", "why"),
    [
        (ModelPart(8, 0, 3), layout(8, 2), "size 3 does not divide tp_lcm, 8"),
        (ModelPart(6, 0, 4), layout(1, 2), "6 KV heads cannot be split to 4 ranks"),
        (ModelPart(8, 2, 2), layout(4, 2), "rank 2 of 2"),
        (ModelPart(8, -1, 2), layout(4, 2), "rank -1 of 2"),
        (ModelPart(0, 0, 1), layout(1, 2), "0 KV heads"),
        (ModelPart(8, 0, 2), layout(2, 2), "has 2 KV heads, expected 4 of 8 on a rank of 2"),
        (ModelPart(8), layout(8, 2, state=True), "recurrent states"),
        (ModelPart(1), layout(1, 2, packing="amx", dtype="uint8"), "opaque blocks"),
        (ModelPart(8, 0, 1, 0, 3), layout(8, 2), "the 2 layers from layer 0 on, of 3, are not whole ranges of 3"),
        (ModelPart(8, 0, 1, 2, 3), layout(8, 2), ", are not whole ranges of"),
        (ModelPart(8, 0, 1, -2, 4), layout(8, 2), ", are not whole ranges of"),
        (ModelPart(8, stage="+pp2"), layout(8, 2), "the layer numbers of this pipeline stage are unknown"),
    ],
)
def test_what_is_no_whole_shard_is_refused_with_the_reason(part: ModelPart, held: KVLayout, why: str) -> None:
    with pytest.raises(BadLayout) as refused:
        split(part, held)
    assert why in refused.value.fact


def test_layers_in_another_order_are_not_split() -> None:
    turned = layout(8, 2, layer_names=("l.1", "l.0"))
    assert split(ModelPart(8), turned).layers == 0
    with pytest.raises(BadLayout, match="order of their names"):
        split(ModelPart(8), turned, pp_lcm=2)


def test_groups_of_unequal_heads_and_too_many_groups_are_refused() -> None:
    one = layout(8, 2).groups[0]
    other = msgspec.structs.replace(one, heads=4, layer_names=("l.2", "l.3"))
    with pytest.raises(BadLayout, match="layer group 1 has 4 KV heads"):
        split(ModelPart(8), KVLayout("paged", (one, other)))
    many = tuple(msgspec.structs.replace(one, layer_names=(f"l.{index}", f"m.{index}")) for index in range(9))
    with pytest.raises(BadLayout, match="more than 64 layer groups"):
        split(ModelPart(8), KVLayout("paged", many))
    assert len(split(ModelPart(8), KVLayout("paged", many[:8])).ranks) == 8


def test_more_heads_than_shards_and_more_ranks_than_heads() -> None:
    assert split(ModelPart(32, 1, 2), layout(16, 1)).ranks == (4, 5, 6, 7)
    assert [split(ModelPart(2, rank, 8), layout(1, 1)).ranks for rank in range(8)] == [(0,)] * 4 + [(1,)] * 4
    assert split(ModelPart(1, 5, 8), layout(1, 1)).ranks == (0,)
