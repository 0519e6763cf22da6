"""What publishers tell, taken in and scored, against a model that remembers every prompt by its tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvf_route import contents as module
from kvf_route import events, prefix_hashes, scoring
from kvf_route import index as index_module
from kvf_route.contents import Contents
from kvf_route.index import Index
from tests.route.publisher import CLEARED, TOPIC, as_array, batch, removed, stored

SIZE = 2
WORDS = st.lists(st.integers(0, 2), min_size=SIZE, max_size=4 * SIZE).map(lambda t: tuple(t[: len(t) // SIZE * SIZE]))
MEDIA = {"GPU": "gpu", "CPU": "cpu", "STORAGE": "storage"}


def hash_of(prefix: tuple[int, ...]) -> int:
    """A publisher's hash of a block: any number that stands for all tokens up to its end."""
    return hash(prefix) % (1 << 63)


def score(contents: Contents, tokens: tuple[int, ...], **asked: Any) -> dict[str, int]:
    nodes = {"a": contents.places}
    *_, scores = scoring.by_tokens(contents._index, nodes, prefix_hashes.packed(tokens), **asked)
    return scores["a"]


def made(blocks: int = 10_000) -> Contents:
    return Contents(Index(blocks), blocks)


class Telling(RuleBasedStateMachine):
    """The model knows, by medium, the prefixes that are told."""

    def __init__(self) -> None:
        super().__init__()
        self.contents = made()
        self.told: dict[str, set[tuple[int, ...]]] = {medium: set() for medium in MEDIA}

    def knows(self, prefix: tuple[int, ...]) -> bool:
        return any(prefix in told for told in self.told.values())

    @rule(data=st.data())
    def batch(self, data: st.DataObject) -> None:
        """Events of a batch: prompts from any block on, removals, a clear."""
        events = []
        for _ in range(data.draw(st.integers(1, 4))):
            medium = data.draw(st.sampled_from(sorted(MEDIA)))
            kind = data.draw(st.sampled_from(["stored", "stored", "stored", "removed", "cleared"]))
            if kind == "cleared" and data.draw(st.integers(0, 4)) == 0:
                events.append(CLEARED)
                self.told = {each: set() for each in MEDIA}
                continue
            tokens = data.draw(WORDS)
            prefixes = [tokens[:end] for end in range(SIZE, len(tokens) + 1, SIZE)]
            if kind == "stored":
                first = data.draw(st.integers(0, len(prefixes) - 1))
                parent = prefixes[first - 1] if first else None
                events.append(
                    stored(
                        [hash_of(each) for each in prefixes[first:]],
                        hash_of(parent) if parent else None,
                        tokens[first * SIZE :],
                        size=SIZE,
                        medium=medium,
                    )
                )
                if parent is None or self.knows(parent):
                    self.told[medium] |= set(prefixes[first:])
            else:
                gone = data.draw(st.lists(st.sampled_from(prefixes)))
                events.append(removed([hash_of(each) for each in gone], medium))
                self.told[medium] -= set(gone)
        if data.draw(st.booleans()):
            events = [as_array(each) if each["type"] == "BlockStored" else each for each in events]
        self.contents.apply(TOPIC, batch(*events))

    @rule(tokens=WORDS)
    def ask(self, tokens: tuple[int, ...]) -> None:
        expected: dict[str, int] = {}
        for end in range(SIZE, len(tokens) + 1, SIZE):
            tier = next((MEDIA[medium] for medium in MEDIA if tokens[:end] in self.told[medium]), None)
            if tier is None:
                break
            expected[tier] = expected.get(tier, 0) + SIZE
        assert score(self.contents, tokens) == expected

    @invariant()
    def holds_what_is_told(self) -> None:
        assert self.contents.blocks == sum(map(len, self.told.values()))


TestTelling = Telling.TestCase
TestTelling.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def test_a_block_whose_parent_is_not_known_is_counted_and_left_out() -> None:
    contents = made()
    contents.apply(TOPIC, batch(stored([2], 1, range(4)), stored([3], None, range(4))))
    assert (contents.counts["orphans"], contents.blocks) == (1, 1)


def test_engines_ranks_and_sizes_of_blocks_are_kept_apart() -> None:
    contents = made()
    first, second = b"kv@node/1@model", b"kv@node/2@model"
    for topic, rank in ((first, 0), (first, 1), (second, 0)):
        contents.apply(topic, batch(stored([1], None, range(4)), rank=rank))
    contents.apply(first, batch(stored([1], None, range(8), size=8)))
    contents.apply(first, batch(removed([1])))
    sizes = {(each.topic, each.rank, each.block_tokens): contents._index.size(each.number) for each in contents.places}
    assert sizes == {(first, 0, 4): 0, (first, 0, 8): 0, (first, 1, 4): 1, (second, 0, 4): 1}
    contents.apply(second, batch(CLEARED))
    assert contents.blocks == 1


def test_the_topic_names_the_model() -> None:
    contents = made()
    for number, topic in enumerate((b"kv@node@org/model@2", b"", b"kv@node", b"kv@node@", b"\xff@\xff@m")):
        contents.apply(topic, batch(stored([number], None, range(4))))
    assert [each.model for each in contents.places] == ["org/model@2", None, None, None, "m"]


def test_of_several_groups_of_layers_the_first_that_has_whole_prefixes_is_followed() -> None:
    contents = made()
    window = stored([1], None, range(4), group_idx=0, kv_cache_spec_kind="sliding_window")
    whole = stored([1], None, range(4), group_idx=1, kv_cache_spec_kind="full_attention")
    other = stored([2], None, range(4), group_idx=2, kv_cache_spec_kind="full_attention")
    contents.apply(TOPIC, batch(window, whole, other))
    assert contents.blocks == 1
    contents.apply(TOPIC, batch({**removed([1]), "group_idx": 0}))
    assert contents.blocks == 1
    contents.apply(TOPIC, batch({**removed([1]), "group_idx": 1}))
    assert contents.blocks == 0
    assert contents.counts["skipped"] == 3


def test_one_publisher_takes_its_part_of_the_index_and_no_more() -> None:
    index = Index(1000)
    greedy, modest = Contents(index, 100), Contents(index, 100)
    for number in range(50):
        greedy.apply(TOPIC, batch(stored(range(10 * number, 10 * number + 10), None, [number] * 40)))
    modest.apply(TOPIC, batch(stored([1, 2], None, range(8))))
    assert (greedy.blocks, greedy.counts["refused"], modest.blocks) == (100, 400, 2)


def test_places_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PLACES", 3)
    contents = made()
    for number in range(10):
        contents.apply(b"kv@%d@m" % number, batch(stored([1], None, range(4))))
    assert (len(contents.places), contents.counts["refused"]) == (3, 7)
    assert len(contents._groups) == 3


def test_nonsense_is_counted_and_the_rest_is_taken() -> None:
    contents = made()
    contents.apply(TOPIC, b"\xc1 no msgpack")
    contents.apply(TOPIC, batch(stored([1], None, range(4)), 7, stored([2], 1, range(4))))
    contents.apply(b"t" * 2000, batch(stored([3], None, range(4))))
    assert (contents.counts["malformed"], contents.blocks) == (3, 2)
    assert contents.last_mistake


def test_salts_and_adapters_are_other_content() -> None:
    contents = made()
    contents.apply(
        TOPIC,
        batch(
            stored([1], None, range(4), cache_salt="s"),
            stored([2], 1, range(4), cache_salt="s"),
            stored([3], None, range(4), lora_name="l"),
        ),
    )
    tokens = (0, 1, 2, 3, 0, 1, 2, 3)
    assert score(contents, tokens) == {}
    assert score(contents, tokens, salt="s") == {"cpu": 8}
    assert score(contents, tokens, salt="other") == {}
    assert score(contents, tokens, adapter="l") == {"cpu": 4}
    assert score(contents, tokens, adapter="l", salt="s") == {}


def test_only_topics_that_begin_so_are_taken_in() -> None:
    contents = Contents(Index(100), 100, topic=b"kv@b@")
    for topic in (b"kv@a@m", b"kv@b@m", b"kv@bb@m"):
        contents.apply(topic, batch(stored([1], None, range(4))))
    assert [place.topic for place in contents.places] == [b"kv@b@m"]


def test_a_bug_costs_a_batch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    contents = made()
    with monkeypatch.context() as patch:
        patch.setattr(prefix_hashes, "chained", None)
        contents.apply(TOPIC, batch(stored([1], None, range(4))))
    assert "a batch of events could not be read" in caplog.text
    contents.apply(TOPIC, batch(stored([2], None, range(4))))
    assert (contents.counts["malformed"], contents.blocks) == (1, 1)


def test_a_batch_is_taken_in_by_steps() -> None:
    """However its blocks are told."""
    contents, blocks = Contents(Index(20_000), 20_000), 5000
    names = range(blocks)
    long = stored(names, None, names, size=1)
    short = [stored([blocks + name], name, [name], size=1) for name in names]
    others = [CLEARED | {"type": "NotYetKnown"}] * blocks
    taken = 0
    for _ in contents.steps(TOPIC, batch(long, *short, removed(names), *others, 7)):
        now = contents.counts.total()
        assert now - taken <= events.AT_ONCE
        taken = now
    expected = {"stored": 2 * blocks, "removed": blocks, "skipped": blocks, "malformed": 1}
    assert {kind: count for kind, count in contents.counts.items() if count} == expected
    assert contents.blocks == blocks


def test_places_that_are_empty_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has served a hundred models in its life, one after another."""
    monkeypatch.setattr(module, "MOST_PLACES", 3)
    contents = made()
    for number in range(10):
        topic = b"kv@n@model %d" % number
        contents.apply(topic, batch(stored([1], None, range(4))))
        assert contents.blocks == 1
        contents.apply(topic, batch(CLEARED if number % 2 else removed([1])))
    assert contents.counts["refused"] == 0
    assert max(len(contents.places), len(contents._groups)) <= 3


def test_a_publisher_that_clears_all_the_time_takes_no_place_of_others() -> None:
    index = Index(1000)
    restless, other = Contents(index, 100), Contents(index, 100)
    restless.apply(TOPIC, batch(*[event for n in range(300) for event in (stored([n], None, range(4)), CLEARED)] * 4))
    assert restless.counts["refused"] == 1200 - index_module.MOST_OF_ONE
    other.apply(TOPIC, batch(stored([1], None, range(4))))
    assert other.blocks == 1
    while index.sweep():
        pass
    restless.apply(TOPIC, batch(stored([1], None, range(4))))
    assert restless.blocks == 1
