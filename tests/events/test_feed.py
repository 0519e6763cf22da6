"""What waits for the publisher is bounded in memory, whoever stores it."""

from __future__ import annotations

import pytest

from kvframework.api.keys import CacheKey
from kvframework.api.transfer import ChunkContent, Extra, Image
from kvframework.events import feed as module
from kvframework.events.feed import Feed

KEY = CacheKey("m", 1, 0, b"n" * 16, 0, 4, "r", digests=b"d" * 32)


def test_objects_count_and_not_the_entries_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OBJECTS", 10)
    feed = Feed()
    feed.came([b"k"] * 6)
    feed.seen(1, [b"k"] * 5, there=True)
    feed.went(b"k")
    assert feed.dropped == 1
    assert [len(keys) for _, keys, _ in feed.take_objects()] == [6, 1]
    assert feed.take_loss()
    assert not feed.take_loss()
    feed.came([b"k"] * 10)
    assert feed.dropped == 1


@pytest.mark.parametrize(
    "content",
    [
        ChunkContent(b"", extras=tuple(Extra(0, b"") for _ in range(1000))),
        ChunkContent(b"", extras=(Extra(0, b"x" * (1 << 16)),) * 4),
        ChunkContent(b"", images=tuple(Image("i", 0, 1) for _ in range(1000))),
    ],
    ids=["extras", "their bytes", "images"],
)
def test_a_content_counts_with_all_that_it_says(content: ChunkContent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CONTENT_BYTES", 300_000)
    feed = Feed()
    for _ in range(3):
        feed.named(KEY, content)
    assert (feed.dropped, feed.waiting) == (2, 1)
    assert len(feed.take_contents()) == 1
    feed.named(KEY, content)
    assert (feed.dropped, feed.waiting) == (2, 1)
