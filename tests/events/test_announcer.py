"""From contents and objects to what is announced: salts, adapters, images, engines' hashes, lost entries."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvf_events.announcer import Announcer
from kvf_events.block_index import L1, News, Stored
from kvf_events.history import Encoder
from kvf_hashers.sha256 import Sha256
from kvframework import record_ring
from kvframework.api.keys import CacheKey, ChunkContent, Extra, Image
from kvframework.api.listener import ChunkShape
from kvframework.record_ring import RecordRing
from tests.events.node import BLOCK, CHUNK, packed
from tests.events.reader import Reader

NAMESPACE = b"n" * 16
PREFIXES = [b"a" * 40, b"b" * 40]
TOKENS = list(range(1, 2 * CHUNK + 1))


class Node:
    """An announcer, and an L1 of which it is announced: `here` has the keys."""

    def __init__(self, *, salts: bool = False, chunk_tokens: int = CHUNK) -> None:
        self.ring = RecordRing(wanted=True)
        self.records = self.ring.open()
        self.here: set[bytes] = set()
        self.hasher = Sha256()
        self.announcer = Announcer(
            self.hasher,
            block_size=BLOCK,
            salts=salts,
            shape_of=lambda namespace, _salt: (
                ChunkShape("m", chunk_tokens, PREFIXES) if namespace == NAMESPACE else None
            ),
            present=lambda keys: [key in self.here for key in keys],
        )
        self.reader = Reader()

    def key(self, tokens: Sequence[int] = TOKENS, start: int = 0, salt: str = "", **extras: Any) -> CacheKey:
        digests = self.hasher.chunk_digests(packed(tokens), CHUNK, **extras)
        return CacheKey("x", 2, 0, NAMESPACE, start, len(tokens), "r", digests=digests, cache_salt=salt)

    def objects(self, key: CacheKey) -> list[bytes]:
        digests = [key.digests[at : at + 32] for at in range(0, len(key.digests), 32)]
        return [prefix + digest for digest in digests for prefix in PREFIXES]

    def store(self, key: CacheKey, content: ChunkContent | None) -> None:
        objects = self.objects(key)
        self.here.update(objects)
        self.ring.added(objects)
        self.ring.registered(key, content)

    def news(self) -> list[News]:
        return self.announcer.turn(self.records.take())

    def turn(self) -> list[dict[str, Any]]:
        return announced(self.news(), self.reader)


def announced(news: list[News], reader: Reader) -> list[dict[str, Any]]:
    payload = Encoder("map", BLOCK).batch(1.0, news)
    reader.batch(payload)
    return msgspec.msgpack.decode(payload)[1]


def test_a_chunk_is_told_once_all_of_its_objects_are_there() -> None:
    node = Node()
    key = node.key()
    first, other, second, last = node.objects(key)
    node.here |= {first, second}
    node.ring.added([first, second])
    node.ring.registered(key, ChunkContent(packed(TOKENS)))
    assert node.turn() == []
    node.ring.added([last])
    assert node.turn() == []  # its parent is not announced
    node.ring.added([other])
    assert [len(event["block_hashes"]) for event in node.turn()] == [CHUNK // BLOCK] * 2
    assert node.reader.prompts() == {tuple(TOKENS[:end]) for end in range(BLOCK, 2 * CHUNK + 1, BLOCK)}


def test_an_unknown_namespace_another_cut_and_a_salt_are_withheld() -> None:
    node = Node()
    node.store(msgspec.structs.replace(node.key(), namespace=b"o" * 16), ChunkContent(packed(TOKENS)))
    node.store(node.key(salt="s"), ChunkContent(packed(TOKENS)))
    other = Node(chunk_tokens=CHUNK + 1)
    other.store(other.key(), ChunkContent(packed(TOKENS)))
    assert node.turn() == other.turn() == []
    assert (node.announcer.withheld, other.announcer.withheld) == (2, 1)


def test_a_salt_is_told_in_both_spellings_in_each_event() -> None:
    for salt in ("s", "dynamo-cache-salt:s"):
        node = Node(salts=True)
        node.store(node.key(salt=salt), ChunkContent(packed(TOKENS)))
        for event in node.turn():
            assert event["cache_salt"] == "s"
            assert event["extra_keys"] == [["dynamo-cache-salt:s"], *[None] * (CHUNK // BLOCK - 1)]


def test_salted_and_unsalted_blocks_of_one_prompt_are_different_blocks() -> None:
    node = Node(salts=True)
    content = ChunkContent(packed(TOKENS))
    plain = node.key()
    node.store(plain, content)
    one = {each for event in node.turn() for each in event["block_hashes"]}
    salted = Node(salts=True)
    salted.store(salted.key(salt="s"), content)
    assert not one & {each for event in salted.turn() for each in event["block_hashes"]}


def test_images_and_adapters_stand_in_the_extra_keys() -> None:
    node = Node()
    extras = {0: b"image"}
    image = Image("photo", BLOCK - 2, 4)
    node.store(node.key(extras=extras), ChunkContent(packed(TOKENS), (Extra(0, b"image"),), images=(image,)))
    first, second = node.turn()
    assert first["extra_keys"] == [[["photo", BLOCK - 2]], [["photo", -2]], None, None]
    assert "extra_keys" not in second
    lora = Node()
    lora.store(lora.key(extras=extras), ChunkContent(packed(TOKENS), (Extra(0, b"image"),), lora_name="poet"))
    events = lora.turn()
    assert [event["lora_name"] for event in events] == ["poet", "poet"]
    assert events[0]["extra_keys"] == [["poet"]] * (CHUNK // BLOCK)
    assert not {*events[0]["block_hashes"]} & {*first["block_hashes"]}


@pytest.mark.parametrize(
    "images",
    [
        (Image("far", -(2**63), 2**63 + CHUNK),),
        tuple(Image(f"upon the others {number}", 0, 2 * CHUNK) for number in range(100)),
        tuple(Image(f"tiny {number % CHUNK}", number % CHUNK, 1) for number in range(1000)),
    ],
    ids=["far", "stacked", "tiny"],
)
def test_images_that_no_prompt_has_are_withheld(images: tuple[Image, ...]) -> None:
    """A client may say what it likes: what it says is bounded, and encoded."""
    node = Node()
    node.store(node.key(), ChunkContent(packed(TOKENS), images=images))
    assert node.turn() == []
    assert node.announcer.withheld == 2
    nowhere = Image("behind", 2**64 - 1, 1), Image("none", 0, 0), Image("less", 5, -(2**63))
    real = Image("video", -5, 2**64 - 1), Image("audio", 0, CHUNK)
    node.store(node.key(), ChunkContent(packed(TOKENS), images=nowhere + real))
    named = [{key[0] for keys in event["extra_keys"] for key in keys} for event in node.turn()]
    assert named == [{"video", "audio"}, {"video"}]


def test_what_no_field_describes_is_withheld_with_all_that_follows() -> None:
    node = Node()
    extras = {0: b"something"}
    node.store(node.key(extras=extras), ChunkContent(packed(TOKENS), (Extra(0, b"something"),)))
    assert node.turn() == []
    assert node.announcer.withheld == 1


def test_engines_hashes_of_the_same_blocks_are_told_and_others_are_not() -> None:
    count = 2 * CHUNK // BLOCK
    hashes = struct.pack(f"<{count}Q", *range(100, 100 + count))
    node = Node()
    node.store(node.key(), ChunkContent(packed(TOKENS), block_size=BLOCK, hashes=hashes))
    assert [each for event in node.turn() for each in event["block_hashes"]] == list(range(100, 100 + count))
    other = Node()
    other.store(other.key(), ChunkContent(packed(TOKENS), block_size=CHUNK, hashes=hashes[:16]))
    assert all(each > 1000 for event in other.turn() for each in event["block_hashes"])


def test_own_hashes_are_the_same_in_each_life_of_a_server_and_fit_int64() -> None:
    found = []
    for _ in range(2):
        node = Node()
        node.store(node.key(), ChunkContent(packed(TOKENS)))
        found.append([each for event in node.turn() for each in event["block_hashes"]])
    assert found[0] == found[1]
    assert max(found[0]) < 1 << 63


def test_a_content_that_begins_later_continues_its_prompt() -> None:
    node = Node()
    node.store(node.key(TOKENS[:CHUNK]), ChunkContent(packed(TOKENS[:CHUNK])))
    node.store(node.key(start=CHUNK), ChunkContent(packed(TOKENS[CHUNK:])))
    first, second = node.turn()
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    whole = Node()
    whole.store(whole.key(), ChunkContent(packed(TOKENS)))
    assert [event["block_hashes"] for event in whole.turn()] == [first["block_hashes"], second["block_hashes"]]


def test_wrong_tokens_are_never_told() -> None:
    node = Node()
    node.store(node.key(), ChunkContent(packed(TOKENS[::-1])))
    assert node.turn() == []
    assert node.announcer.mismatched == 1
    node.ring.registered(node.key(), ChunkContent(packed(TOKENS)))
    assert len(node.turn()) == 2


def test_lost_entries_are_counted_and_what_is_told_is_right_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.store(node.key(), ChunkContent(packed(TOKENS)))
    node.ring.accessed(1, node.objects(node.key())[:2], True)
    node.turn()
    assert node.reader.held["STORAGE"]
    monkeypatch.setattr(record_ring, "MOST_BYTES", 0)
    gone = node.objects(node.key())[2]
    node.here.discard(gone)
    node.ring.removed(gone)
    node.turn()
    assert node.records.lost == 1
    assert len(node.reader.held["CPU"]) == CHUNK // BLOCK
    assert not node.reader.held["STORAGE"]  # tiers are learnt anew by use


def test_array_events_are_positions_in_vllms_order() -> None:
    node = Node()
    node.store(node.key(), ChunkContent(packed(TOKENS)))
    news = node.news()
    stored = news[1]
    assert isinstance(stored, Stored)
    (kind, hashes, parent, tokens, size, lora, medium) = msgspec.msgpack.decode(
        Encoder("array", BLOCK).batch(1.0, [stored])
    )[1][0]
    assert (kind, size, lora, medium) == ("BlockStored", BLOCK, None, "CPU")
    assert (tokens, parent) == (TOKENS[CHUNK:], news[0].chunk.hashes[-1])  # type: ignore[union-attr]
    assert tuple(hashes) == stored.chunk.hashes
    node.announcer.index.removed(node.objects(node.key())[2], L1)
    removed = msgspec.msgpack.decode(Encoder("array", BLOCK).batch(1.0, node.announcer.index.take()))[1][0]
    assert removed == ["BlockRemoved", hashes, "CPU"]
