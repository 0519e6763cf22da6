"""What is announced, against a model that computes it from nothing after each step; a reader checks each rule."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvf_events import block_index as module
from kvf_events.block_index import L1, BlockIndex, Medium, Removed, Stored
from kvf_events.chunks import Chunk, chunks_of
from kvf_events.history import Encoder
from kvframework.api.keys import ChunkContent
from tests.events.reader import Reader

CHUNK, BLOCK = 8, 2
NAMESPACE = b"n" * 16
PREFIXES = (b"a" * 40, b"b" * 40)
PLACES = (0, 1, 2)


def _chunks() -> list[Chunk]:
    """Two levels of three chunks each under two roots; some share their first blocks."""
    made: list[Chunk] = []

    def add(parent: bytes, tokens: tuple[int, ...]) -> bytes:
        digest = bytes([len(made) + 1]) * 32
        packed = b"".join(each.to_bytes(4, "little") for each in tokens)
        digests = (parent or b"") + digest
        (chunk,) = chunks_of(
            ChunkContent(packed),
            digests,
            CHUNK if parent else 0,
            chunk_tokens=CHUNK,
            block_size=BLOCK,
            model="m",
            salt="",
        )
        made.append(chunk)
        return digest

    for root in ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 9, 9, 9, 9)):
        top = add(b"", root)
        for tail in ((1, 1), (2, 2)):
            middle = add(top, (5, 5, 5, 5, *tail, *tail))
            add(middle, (7, 7, *tail, 7, 7, 7, 7))
    return made


CHUNKS = _chunks()
some = st.sampled_from(range(len(CHUNKS)))
rows = st.sampled_from(range(len(PREFIXES)))
places = st.sampled_from(PLACES)


class Told(RuleBasedStateMachine):
    """`here` has the objects (chunk, row, place), `named` the chunks whose content is index."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.reader = Reader()
        self.encoder = Encoder("map", BLOCK)
        self.here: set[tuple[int, int, int]] = set()
        self.named: set[int] = set()

    @rule(chunk=some, row=rows, place=places)
    def added(self, chunk: int, row: int, place: int) -> None:
        self.here.add((chunk, row, place))
        self.index.added(PREFIXES[row] + CHUNKS[chunk].digest, place)

    @rule(chunk=some, row=rows, place=places)
    def went(self, chunk: int, row: int, place: int) -> None:
        self.here.discard((chunk, row, place))
        self.index.removed(PREFIXES[row] + CHUNKS[chunk].digest, place)
        self._forget()

    @rule(chunk=some)
    def all_added(self, chunk: int) -> None:
        for row in range(len(PREFIXES)):
            self.added(chunk, row, L1)

    @rule(chunk=some)
    def name(self, chunk: int) -> None:
        present = [(chunk, row, L1) in self.here for row in range(len(PREFIXES))]
        self.index.register(NAMESPACE, "m", "", PREFIXES, [(CHUNKS[chunk], present)])
        self.named.add(chunk)
        self._forget()

    @rule()
    def name_all(self) -> None:
        for chunk in range(len(CHUNKS)):
            self.name(chunk)

    @rule(chunk=some, bits=st.lists(st.booleans(), min_size=2, max_size=2))
    def are(self, chunk: int, bits: list[bool]) -> None:
        """The truth about L1, after news of it were lost."""
        if chunk not in self.named:
            return
        line = self.index.lines.get((NAMESPACE, ""))
        self.index.correct(line, CHUNKS[chunk].digest, bits)
        self.here = {each for each in self.here if (each[0], each[2]) != (chunk, L1)}
        self.here |= {(chunk, row, L1) for row, bit in enumerate(bits) if bit}
        self._forget()

    @rule()
    def forget_tiers(self) -> None:
        self.index.forget_tiers()
        self.here = {each for each in self.here if each[2] == L1}
        self._forget()

    def _forget(self) -> None:
        self.named &= {chunk for chunk, _, _ in self.here}

    def _expected(self) -> dict[str, set[int]]:
        announced: dict[bytes, set[str]] = {b"": {"root"}}
        expected: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        for number, chunk in enumerate(CHUNKS):  # parents come first
            media = {
                "CPU" if place == L1 else "STORAGE"
                for place in PLACES
                if all((number, row, place) in self.here for row in range(len(PREFIXES)))
            }
            announced[chunk.digest] = media if number in self.named and announced[chunk.parent] else set()
            for medium in announced[chunk.digest]:
                expected[medium].update(chunk.hashes)
        return expected

    @invariant()
    def equals_the_model(self) -> None:
        self.reader.batch(self.encoder.batch(1.0, self.index.take()))
        expected = self._expected()
        assert self.reader.now == expected
        late = Reader()
        late.batch(self.encoder.batch(1.0, list(self.index.snapshot())))
        assert late.now == expected
        announced = self.index.announced()
        assert {medium.name: set(announced.get(("m", medium), ())) for medium in Medium} == expected
        assert self.index.blocks == {medium: len(held) for medium, held in expected.items()}


def test_what_is_told_is_what_a_request_can_hit() -> None:
    run_state_machine_as_test(Told, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def _named(
    index: BlockIndex,
    chunk: Chunk,
    *,
    namespace: bytes = NAMESPACE,
    model: str = "m",
    prefixes: tuple[bytes, ...] = PREFIXES,
) -> None:
    index.register(namespace, model, "", prefixes, [(chunk, [True] * len(prefixes))])


def test_a_removed_beginning_takes_its_continuations_along_and_brings_them_back() -> None:
    index = BlockIndex()
    for chunk in CHUNKS[:3]:
        _named(index, chunk)
    assert [type(each) for each in index.take()] == [Stored] * 3
    index.removed(PREFIXES[1] + CHUNKS[0].digest, L1)
    (removed,) = index.take()
    assert isinstance(removed, Removed)
    assert len(removed.hashes) == 3 * CHUNK // BLOCK
    index.added(PREFIXES[1] + CHUNKS[0].digest, L1)
    assert [each.chunk.digest for each in index.take() if isinstance(each, Stored)] == [c.digest for c in CHUNKS[:3]]


def test_equal_tokens_of_two_models_are_two_blocks() -> None:
    index = BlockIndex()
    _named(index, CHUNKS[0])
    _named(index, CHUNKS[0], namespace=b"o" * 16, model="other", prefixes=(b"c" * 40,))
    assert [each.model for each in index.take()] == ["m", "other"]


def test_another_order_of_layers_makes_what_was_told_gone() -> None:
    index = BlockIndex()
    _named(index, CHUNKS[0])
    index.take()
    _named(index, CHUNKS[5], prefixes=(b"c" * 40,))
    removed, stored = index.take()
    assert isinstance(removed, Removed)
    assert isinstance(stored, Stored)


def test_what_is_in_tiers_alone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ASIDE", 3)
    monkeypatch.setattr(module, "MOST_UNNAMED", 4)
    index = BlockIndex()
    for chunk, prefix in itertools.product(CHUNKS[:2] + CHUNKS[5:8], PREFIXES):
        index.added(prefix + chunk.digest, 1)
    for chunk in CHUNKS[5:8]:
        index.register(NAMESPACE, "m", "", PREFIXES, [(chunk, [False, False])])
    line = index.lines.get((NAMESPACE, ""))
    assert set(line.held) == {each.digest for each in CHUNKS[6:8]}  # the oldest objects were forgotten
    for chunk in CHUNKS:
        _named(index, chunk)
        index.added(PREFIXES[0] + chunk.digest, 1)
    for chunk in CHUNKS:
        for prefix in PREFIXES:
            index.removed(prefix + chunk.digest, L1)
    line = index.lines.get((NAMESPACE, ""))
    assert len(line.held) <= 3
