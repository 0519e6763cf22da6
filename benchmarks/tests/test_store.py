"""`bench store` with a tiny shape: its verification, and that no wrong bytes are ever reported as good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvframework.api.futures import Future  # noqa: E402
from kvframework.api.transport import LoadOutcome, StoreOutcome  # noqa: E402
from kvframework.client import WorkerAdapter  # noqa: E402
from kvframework_bench.document import Document  # noqa: E402
from kvframework_bench.engine import PagedMemory, Transfers  # noqa: E402
from kvframework_bench.errors import BenchFailed, BenchUnavailable, WrongBytes  # noqa: E402
from kvframework_bench.machine import Load, describe_machine  # noqa: E402
from kvframework_bench.server import RunningServer, running_server  # noqa: E402
from kvframework_bench.store import bench_store  # noqa: E402
from kvframework_bench.tables import tables, warning  # noqa: E402
from kvframework_bench.workload import SHAPES, Shape, TransferPath  # noqa: E402

pytestmark = pytest.mark.torch

TINY = Shape("tiny", layers=2, heads=1, head_dim=8, tokens=512, target_ratio=0.1, rounds=2)


def loaded(memory: PagedMemory) -> None:
    for kv in memory.kv.values():
        kv[:, memory.target] = kv[:, memory.source]


@pytest.mark.parametrize("shuffled", [True, False])
def test_what_was_loaded_verifies(shuffled: bool) -> None:
    memory = PagedMemory(TINY, shuffled=shuffled)
    assert sorted(memory.source + memory.target) == list(range(2 * TINY.blocks))
    assert (memory.source == sorted(memory.source)) is not shuffled
    memory.poison()
    with pytest.raises(WrongBytes):
        memory.verify()
    loaded(memory)
    memory.verify()


@pytest.mark.parametrize(("layer", "plane", "index", "token"), [(0, 0, 0, 0), (1, 1, -1, 15), (0, 1, 7, 3)])
def test_a_single_wrong_bit_is_found(layer: int, plane: int, index: int, token: int) -> None:
    memory = PagedMemory(TINY, shuffled=True)
    loaded(memory)
    place = memory.kv[f"layers.{layer}"].view(torch.uint8)[plane, memory.target[index], token, 0]
    place[0] ^= 1
    with pytest.raises(WrongBytes, match=rf"1 retrieved bytes of layers\.{layer}") as found:
        memory.verify()
    assert found.value.where == f"plane {plane}, token {index % TINY.blocks * 16 + token}"


def test_swapped_keys_and_values_are_found() -> None:
    memory = PagedMemory(TINY, shuffled=True)
    for kv in memory.kv.values():
        kv[:, memory.target] = kv[:, memory.source].flip(0)
    with pytest.raises(WrongBytes):
        memory.verify()


def test_the_shapes_are_those_they_are_called_after() -> None:
    assert SHAPES["llama-3-8b"].bytes_per_token == 131072
    assert SHAPES["llama-3-8b"].nbytes == 256 << 20
    assert SHAPES["12kb"].bytes_per_token == 12288
    assert SHAPES["1kb"].bytes_per_token == 1024
    assert SHAPES["1kb"].nbytes == 2 << 20


def test_a_bench_reports_what_it_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    servers: list[Path] = []

    def starting(directory: Path, capacity: int, settings: Sequence[str] = ()) -> AbstractContextManager[RunningServer]:
        servers.append(directory)
        return running_server(directory, capacity, settings)

    monkeypatch.setattr("kvframework_bench.store.running_server", starting)

    class Counting:
        def __init__(self, title: str, total: int) -> None:
            self.total = total

        def __enter__(self) -> Callable[[], None]:
            return lambda: steps.append("step")

        def __exit__(self, *_exc: object) -> None:
            assert len(steps) == self.total

    figures = bench_store([TINY], stage=Counting)
    (shape,) = figures.shapes
    assert len(set(servers)) == 3, "each first transfer has a separate server, and all later ones have another"
    assert (figures.path, figures.blocks) == ("arena", "shuffled")
    assert (shape.verified, shape.nbytes, shape.rounds) == (True, TINY.nbytes, 2)
    for transfer in (shape.store, shape.retrieve):
        assert 0 < transfer.gb_s.min <= transfer.gb_s.median <= transfer.gb_s.max
        assert 0 < transfer.ratio_to_copy.min <= transfer.ratio_to_copy.max
        assert 0 < transfer.first_gb_s.min <= transfer.first_gb_s.median <= transfer.first_gb_s.max
        assert transfer.ratio_to_zmq is None


def test_over_the_wire_the_reference_is_a_bare_transfer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a transport that takes the arena all the same: this is about what the bench compares with."""
    monkeypatch.setattr("kvframework_bench.store.transport_options", lambda _path, _plugins: {})
    figures = bench_store([TINY], path=TransferPath.wire)
    for transfer in (figures.shapes[0].store, figures.shapes[0].retrieve):
        assert transfer.ratio_to_zmq is not None
        assert transfer.ratio_to_zmq.min > 0
    document = Document("store", False, describe_machine(), Load.of(0.0, 0.0, 0.0), figures)
    (table,) = tables(document)
    assert [column.header for column in table.columns][-2:] == ["Ratio to ZMQ", "Target"]
    assert table.row_count == 3
    assert warning(document) == ""


def test_wrong_bytes_make_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Transfers.retrieve

    def corrupting(self: Transfers) -> float:
        seconds = honest(self)
        self.memory.kv["layers.1"].view(torch.uint8)[1, self.memory.target[3], 2, 0, 5] ^= 1
        return seconds

    monkeypatch.setattr(Transfers, "retrieve", corrupting)
    with pytest.raises(WrongBytes, match=r"1 retrieved bytes of layers\.1"):
        bench_store([TINY])


def test_bytes_that_go_wrong_later_make_no_figures_either(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = WorkerAdapter.submit_retrieve, []

    def idle_after_the_first(
        self: WorkerAdapter, request: Any, start: int, end: int, block_ids: Any
    ) -> Future[LoadOutcome]:
        calls.append(start)
        return honest(self, request, start, end, block_ids) if len(calls) == 1 else Future.resolved(LoadOutcome(True))

    monkeypatch.setattr(WorkerAdapter, "submit_retrieve", idle_after_the_first)
    with pytest.raises(WrongBytes):
        bench_store([TINY])


def test_a_store_that_drops_is_no_fast_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        WorkerAdapter,
        "submit_store",
        lambda *_args: Future.resolved(StoreOutcome(stored=1, present=1)),
    )
    with pytest.raises(BenchFailed, match="a store of 2 chunks"):
        bench_store([TINY])


def test_a_miss_is_no_fast_retrieve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerAdapter, "submit_retrieve", lambda *_args: Future.resolved(LoadOutcome(False)))
    with pytest.raises(BenchFailed, match="is a miss"):
        bench_store([TINY])


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(BenchUnavailable, match="not installed: torch, numpy"):
        bench_store([TINY])
