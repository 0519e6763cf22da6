"""The split of a model to shards: pure. What a server accepts of an instance that says which shards it holds, and what
it never does."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework import errors
from kvframework.api.keys import CacheKey, compute_namespace
from kvframework.api.layout import KVLayout, LayerGroup, canonical_desc
from kvframework.client.shards import ModelPart, Shards, shards_of
from kvframework.errors import BadLayout
from kvframework.wire import messages as m
from tests.support.server_process import ServerProcess, client_fixture, server_fixture
from tests.support.wire_client import WireClient

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


GROUP = LayerGroup(2, 16, 1, 8, "float16", layer_names=("l.0", "l.1"))
NAMESPACE = bytes(range(16))
GOOD = m.RegisterKvCache(3, "m", 4, 2, NAMESPACE, "cpu_gather", KVLayout("paged", (GROUP, GROUP), 8), ranks=(2, 3))


server = server_fixture(f"server.chunk_size={CHUNK}", "server.tp_lcm=4", scope="module")


client = client_fixture(emptied=True)


def key(rank: int | None = 2) -> CacheKey:
    tokens = b"".join(number.to_bytes(4, "little") for number in range(2 * CHUNK))
    return CacheKey("m", 4, rank, NAMESPACE, 0, 2 * CHUNK, "r", tokens)


def test_a_server_tells_its_setting(client: WireClient) -> None:
    assert (client.hello.tp_lcm, client.hello.pp_lcm) == (4, 1)


def test_ranks_that_cannot_be_are_refused(client: WireClient) -> None:
    other = msgspec.structs.replace
    wide = other(GROUP, heads=2)
    opaque = LayerGroup(2, 16, 1, 64, "uint8", packing="p")
    for bad, error, why in (
        (other(GOOD, ranks=(2, 2)), errors.NamespaceMismatch, "other ranks"),
        (other(GOOD, ranks=(3, 2)), errors.NamespaceMismatch, "rank 2, then other"),
        (other(GOOD, ranks=(2, 4)), errors.NamespaceMismatch, "below 4"),
        (other(GOOD, ranks=(2, -1)), errors.NamespaceMismatch, "below 4"),
        (other(GOOD, ranks=(2, 3, 0)), errors.BadLayout, "each of 3 ranks"),
        (other(GOOD, layout=KVLayout("paged", (GROUP, wide), 8)), errors.BadLayout, "equal groups"),
        (other(GOOD, layout=KVLayout("paged", (GROUP,), 8)), errors.BadLayout, "equal groups"),
        (other(GOOD, layout=KVLayout("paged", (opaque, opaque), 8)), errors.BadLayout, "canonical"),
    ):
        with pytest.raises(error, match=why):
            client.call("REGISTER_KV_CACHE", bad)
    assert client.status()["instances"] == []
    with pytest.raises(errors.KVFrameworkError):
        client.call("REGISTER_KV_CACHE", other(GOOD, ranks=tuple(range(65)), world_size=100))


def test_an_instance_has_places_of_its_own_shards_only(server: ServerProcess, client: WireClient) -> None:
    registered = client.call("REGISTER_KV_CACHE", GOOD)
    assert len(registered.desc.groups) == 2
    (instance,) = client.status()["instances"]
    assert (instance["world_size"], instance["rank"], instance["shards"]) == (4, 2, [2, 3])
    plan = client.call("PREPARE_STORE", m.Prepare(key(), 3))
    assert [(place.chunk, place.group) for place in plan.ranges] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {place.length for place in plan.ranges} == {2 * 2 * CHUNK * 8 * 2}
    assert client.call("COMMIT_STORE", m.Commit(plan.lease)).outcome.stored == 4
    for wrong in (3, 0, None):
        with pytest.raises(errors.NamespaceMismatch):
            client.call("PREPARE_STORE", m.Prepare(key(wrong), 3))
    for counts in ((0,), (0, 0, 0), (1, 0)):
        with pytest.raises(errors.BadRange, match="first_chunks"):
            client.call("PREPARE_STORE", m.Prepare(key(), 3, counts))
    assert client.call("LOOKUP", m.Lookup(key(None))).hit_tokens == 0, "two of four shards"
    # The others come from an engine of four ranks.
    for rank in (0, 1):
        alone = msgspec.structs.replace(
            GOOD, instance_id=10 + rank, rank=rank, ranks=(rank,), layout=KVLayout("paged", (GROUP,), 8)
        )
        client.call("REGISTER_KV_CACHE", alone)
        plan = client.call("PREPARE_STORE", m.Prepare(key(rank), 10 + rank))
        assert client.call("COMMIT_STORE", m.Commit(plan.lease)).outcome.stored == 2
    found = client.call("LOOKUP", m.Lookup(key(None)))
    assert found.hit_tokens == 2 * CHUNK
    client.call("FREE_LOOKUP_LOCKS", m.TicketRef(found.ticket))


def test_other_layers_in_a_shard_that_is_held_are_refused(client: WireClient) -> None:
    client.call("REGISTER_KV_CACHE", GOOD)
    turned = msgspec.structs.replace(GROUP, layer_names=("l.1", "l.0"))
    for ranks, refused in (((1, 3), True), ((0, 1), False)):
        payload = msgspec.structs.replace(
            GOOD, instance_id=4 + ranks[0], rank=ranks[0], ranks=ranks, layout=KVLayout("paged", (turned, turned), 8)
        )
        if refused:
            with pytest.raises(errors.NamespaceMismatch, match="in another order"):
                client.call("REGISTER_KV_CACHE", payload)
        else:
            client.call("REGISTER_KV_CACHE", payload)
