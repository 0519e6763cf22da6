"""Arguments that an engine gets wrong, or changes too early: an error that names them, and the right blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvframework.api.futures import Future
from kvframework.api.layout import NO_BLOCK
from kvframework.errors import BadBlockIds, BadRange
from tests.support.engines import BLOCKS, PagedEngine
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.torch


PATIENCE_S = 30.0
TOKENS = 512
IDS = list(range(32))


class Count:
    """An integer of another library, such as NumPy's."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.number, name)


class Number(int):
    """An integer of another library that is an int, too."""


BAD_IDS: dict[str, Any] = {
    "beyond the last block": [[*IDS[:-1], BLOCKS]],
    "huge": [[1 << 70] * 32],
    "negative": [[*IDS[:-1], -1]],
    "no block": [[*IDS[:-1], NO_BLOCK]],
    "too few": [IDS[:-1]],
    "too many": [[*IDS, 33]],
    "none": [[]],
    "no list": [],
    "a list too many": [IDS, IDS],
    "not in a list per layer group": [5],
    "None": [None],
    "floats": [[float(each) for each in IDS]],
    "nested": [[[each] for each in IDS]],
    "text": ["a" * 32],
    "as many bytes": [bytes(32)],
    "packed": [bytes(4 * 32)],
    "in a bytearray": [bytearray(32)],
}
BAD_RANGES: dict[str, tuple[Any, Any]] = {
    "empty": (256, 256),
    "backwards": (512, 256),
    "before the prompt": (-256, 256),
    "beyond what is hashed": (0, 768),
    "huge": (0, 256 << 70),
    "half a chunk": (0, 384),
    "floats": (0.0, 512.0),
    "text": ("0", "512"),
    "None": (None, 512),
}
BAD_SKIPS: dict[str, Any] = {"negative": -1, "too many": 513, "a float": 16.0, "text": "16", "None": None}


def submits(engine: PagedEngine, start: Any = 0, end: Any = TOKENS, ids: Any = None) -> list[Callable[[], Any]]:
    request = engine.request(list(range(TOKENS)))
    blocks = [IDS] if ids is None else ids
    worker = engine.worker
    return [
        lambda: worker.submit_store(request, start, end, blocks),
        lambda: worker.submit_retrieve(request, start, end, blocks),
    ]


@pytest.mark.parametrize("ids", BAD_IDS.values(), ids=BAD_IDS)
def test_bad_block_ids_are_named_before_anything_is_sent(server: ServerProcess, engine: PagedEngine, ids: Any) -> None:
    for submit in submits(engine, ids=ids):
        with pytest.raises(BadBlockIds):
            submit()
    assert engine.worker.get_finished() == (set(), set())
    assert server.status()["l1"]["objects"] == 0


@pytest.mark.parametrize("ends", BAD_RANGES.values(), ids=BAD_RANGES)
def test_a_bad_range_is_named_before_anything_is_sent(engine: PagedEngine, ends: tuple[Any, Any]) -> None:
    for submit in submits(engine, *ends):
        with pytest.raises(BadRange):
            submit()
    assert engine.worker.get_finished() == (set(), set())


@pytest.mark.parametrize("skip", BAD_SKIPS.values(), ids=BAD_SKIPS)
def test_a_bad_number_of_skipped_tokens_is_named(engine: PagedEngine, skip: Any) -> None:
    with pytest.raises(BadRange):
        engine.worker.submit_retrieve(engine.request(list(range(TOKENS))), 0, TOKENS, [IDS], skip_first_n_tokens=skip)


@pytest.mark.parametrize("kind", [Count, Number])
def test_integers_of_other_libraries_are_integers(engine: PagedEngine, kind: Any) -> None:
    request, target = engine.request([len(kind.__name__), *range(TOKENS)]), [kind(each) for each in range(63, 31, -1)]
    stored = engine.worker.submit_store(request, kind(0), kind(TOKENS), [[kind(each) for each in IDS]])
    assert stored.result(PATIENCE_S).ok
    loaded = engine.worker.submit_retrieve(request, kind(0), kind(TOKENS), [target], skip_first_n_tokens=kind(16))
    assert loaded.result(PATIENCE_S).ok
    assert all(torch.equal(kv[:, 32:63], kv[:, IDS[1:]].flip(1)) for kv in engine.kv.values())


@pytest.mark.parametrize(
    "result",
    [None, True, Future.resolved(None), Future.resolved(True)],
    ids=["nothing", "a bool", "a future of nothing", "a future of a bool"],
)
def test_a_transport_that_returns_something_else_is_a_miss(
    engine: PagedEngine, result: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.worker._instance.transfer, "store", lambda _: result)
    monkeypatch.setattr(engine.worker._instance.transfer, "load", lambda _, __: result)
    lost: list[str] = []
    monkeypatch.setattr(engine.client, "lost", lambda kind, *_: lost.append(kind))
    for submit in submits(engine):
        assert submit().query()
    assert engine.worker.get_finished() == ({"r"}, {"r"})
    assert engine.worker.take_failed_blocks() == [set(IDS)]
    assert lost == ["stores", "loads"]


@pytest.mark.parametrize("closed", [False, True])
def test_a_failed_load_names_the_blocks_of_its_submit(engine: PagedEngine, closed: bool) -> None:
    if closed:
        engine.worker.close()
    ids = list(IDS)
    future = engine.worker.submit_retrieve(engine.request([1, *range(TOKENS)]), 0, TOKENS, [ids])
    ids.clear()  # the engine's own list, which it uses again
    assert not future.result(0 if closed else PATIENCE_S).ok
    assert engine.worker.get_finished() == (set(), {"r"})
    assert engine.worker.take_failed_blocks() == [set(IDS)]


def test_a_block_twice_in_one_store_is_refused(engine: PagedEngine) -> None:
    """The bytes of one block would be stored under two digests, of which one at least would lie."""
    store, load = submits(engine, ids=[[*IDS[:-1], IDS[0]]])
    with pytest.raises(BadBlockIds, match=r"tokens 0 to 512.*layer group 0.*twice"):
        store()
    assert load().query(), "a load writes only the engine's own blocks"


def test_what_is_no_block_is_named(engine: PagedEngine) -> None:
    for submit in submits(engine, ids=[[NO_BLOCK, *IDS[1:]]]):
        with pytest.raises(BadBlockIds, match=r"request 'r', tokens 0 to 512, layer group 0.*NO_BLOCK"):
            submit()
