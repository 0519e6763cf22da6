"""The integrations load what has arrived from L2 while the rest arrives; a tier that fails on the way leaves a prefix,
and the tokens are those of a computed prompt."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from kvframework.api.tier import Outcome, PackedKey, TierProvider, hookimpl
from kvframework.client import LookupResult, SchedulerAdapter, WorkerAdapter
from kvframework.errors import TierError
from kvframework.server import Server
from kvframework.storage.l2 import loading
from kvframework.wire import messages as m
from tests.core.server.in_process import serving
from tests.core.storage.tier import MemoryTier
from tests.support.lazy import torch, transformers
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

pytestmark = pytest.mark.torch

CHUNK, CHUNKS = 32, 6
PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "own_engine" / "own_engine.py"


class PartByPart(MemoryTier):
    """A tier that gives two objects, and the others once the engine has loaded those; or then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first_is_loaded = threading.Event()
        self.fails = False
        self._gets = 0

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        self._gets += 1
        if self._gets > 1:
            assert self.first_is_loaded.wait(60.0), "the engine waits for the rest"
            if self.fails:
                raise TierError("it failed on the way")
        return super().get_into(keys, parts, deadline=deadline)


class Node:
    """A server with that tier. `loaded` are the tokens of each load, in order."""

    def __init__(self, server: Server, tier: PartByPart, wire: WireClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.endpoint, self.tier, self.wire = server.endpoint, tier, wire
        self.loaded: list[tuple[int, int]] = []
        honest = WorkerAdapter.submit_retrieve

        def seen(worker: WorkerAdapter, request: Any, start: int, end: int, *rest: Any, **named: Any) -> Any:
            future = honest(worker, request, start, end, *rest, **named)
            self.loaded.append((start, end))
            future.add_done_callback(lambda _done: tier.first_is_loaded.set())
            return future

        monkeypatch.setattr(WorkerAdapter, "submit_retrieve", seen)

    def forget(self) -> None:
        """From now on only the tier has what was stored."""
        wait_until(lambda: self.wire.status()["l2"][0]["write_pending"] == 0, what="the write to L2")
        assert self.wire.call("CLEAR", m.Clear()).in_use == 0

    def await_end(self) -> None:
        wait_until(lambda: not self.wire.status()["prefetch"]["in_flight"], what="the end of the load")
        wait_until(lambda: self.wire.status()["l1"]["pins"] == 0, what="no pin")
        assert self.wire.status()["tickets"] == 0

    def check(self, hit: int, most: int) -> None:
        """Each load goes on where the one before it ended."""
        assert self.loaded[0] == (0, 2 * CHUNK)
        assert [start for start, _ in self.loaded[1:]] == [end for _, end in self.loaded[:-1]]
        assert self.loaded[-1][1] == hit == (2 * CHUNK if self.tier.fails else most)
        self.await_end()


@pytest.fixture(params=[False, True], ids=["all of it comes", "the tier fails on the way"])
def node(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Node]:
    monkeypatch.setattr(loading, "BATCH_OBJECTS", 2)
    monkeypatch.setenv("KVFRAMEWORK_DEADLINE_SCALE", "20")
    tier = PartByPart()
    tier.fails = request.param

    class Plugin:
        @hookimpl
        def kvf_tiers(self) -> list[TierProvider]:  # type: ignore[type-arg]
            return [TierProvider(name="held", summary="", create=lambda _options, _context: tier)]

    settings = (f"server.chunk_size={CHUNK}", "l2.0.use=held", "l2.0.timeout_s=120.0", "l2.0.loads=1")
    with serving(*settings, plugins=(Plugin(),)) as server, WireClient(server.endpoint) as wire:
        yield Node(server, tier, wire, monkeypatch)


def test_transformers(node: Node) -> None:
    from kvf_transformers import TransformersKV

    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(2, 97, (1, CHUNKS * CHUNK + 9))
    with TransformersKV(
        model, endpoint=node.endpoint, model_name="arriving", deadline_scale=20.0, transfer_timeout_s=120.0
    ) as kv:
        computed = kv.generate(ids, 8)
        assert computed.restored.hit_tokens == 0
        node.forget()
        loaded = kv.generate(ids, 8)
        node.check(loaded.restored.hit_tokens, CHUNKS * CHUNK)
    assert loaded.tokens == computed.tokens


def test_own_engine(node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVFRAMEWORK_ENDPOINT", node.endpoint)
    monkeypatch.setattr(SchedulerAdapter, "arrivals", partialmethod(_patient, SchedulerAdapter.arrivals))
    engine = run_path(str(PROGRAM))["Engine"]()
    prompt = list(range(CHUNKS * CHUNK + 9))
    try:
        engine.answer(prompt)
        node.forget()
        engine.answer(prompt)
    finally:
        engine.cache.close()
    said = capsys.readouterr().out
    none, hit = map(int, re.findall(r"loaded (\d+) of", said))
    assert none == 0
    node.check(hit, CHUNKS * CHUNK)
    assert len(set(re.findall(r"next token is (\d+)", said))) == 1


def _patient(self: SchedulerAdapter, honest: Callable[..., Any], found: LookupResult, _seconds: float) -> Any:
    """Arrivals without the program's deadline, which a busy machine may pass."""
    return honest(self, found, 120.0)
