"""Pages between host pools and a real server: every layout, states, ranks, what is evicted, cleared or refused, servers
that are not there, hang, die and come again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvf_sglang.cache import KV, Worker
from kvframework.client import KvIdentity, WorkerAdapter
from kvframework.errors import ConfigFieldError
from kvframework.wire import messages as m
from tests.sglang import pools
from tests.sglang.caches import MAMBA, Engine
from tests.sglang.pools import (
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    Transfer,
    content,
    keys,
    turned,
)
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    server.__exit__()


@pytest.fixture
def server(shared: ServerProcess) -> ServerProcess:
    return shared.emptied()


MHA_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


@pytest.mark.parametrize(("stored", "loaded"), [*zip(MHA_LAYOUTS, [*MHA_LAYOUTS[1:], MHA_LAYOUTS[0]], strict=True)])
def test_each_layout_loads_what_another_has_stored(server: ServerProcess, stored: str, loaded: str) -> None:
    names = keys(6)
    with Engine(server.endpoint, MHATokenToKVPoolHost(stored)) as first:
        assert first.cache.find(names).pages == 0
        assert first.store(names[:4], first=3) == [True] * 4
        # What follows begins anywhere in a prompt: its hash names all before it.
        assert first.store(names[4:]) == [True] * 2
    with Engine(server.endpoint, MHATokenToKVPoolHost(loaded)) as second:
        assert second.cache.find([*names, *keys(1, seed="x")]) == (6, {KV: 6}, [1, 2, 3, 4, 5, 6])
        assert second.load(names, first=2) == [True] * 6
        assert second.load(names[3:5], first=7) == [True] * 2


def test_a_latent_plane_is_stored_once_for_all_ranks(server: ServerProcess) -> None:
    names = keys(3)
    first, other = (Worker(tp_rank=rank, tp_size=2, replicated=True) for rank in (0, 1))
    with Engine(server.endpoint, MLATokenToKVPoolHost(), worker=first) as one:
        assert one.store(names) == [True] * 3
        with Engine(server.endpoint, MLATokenToKVPoolHost("page_first_direct"), worker=other) as two:
            assert two.cache.find(names).pages == 3
            assert two.load(names) == [True] * 3


def test_ranks_hold_their_own_heads_and_a_hit_is_what_all_have(server: ServerProcess) -> None:
    names = keys(4)
    workers = [Worker(tp_rank=rank, tp_size=2) for rank in (0, 1)]
    with (
        Engine(server.endpoint, MHATokenToKVPoolHost(), worker=workers[0]) as one,
        Engine(server.endpoint, MHATokenToKVPoolHost(), worker=workers[1]) as two,
    ):
        assert one.store(names) == [True] * 4
        assert two.store(names[:2]) == [True] * 2
        assert [engine.cache.find(names).pages for engine in (one, two)] == [2, 2]
        assert two.load(names[:2]) == [True] * 2


def test_names_hold_all_that_makes_keys_and_values_differ(server: ServerProcess) -> None:
    names = keys(2)
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine:
        assert engine.store(names) == [True] * 2
        differing: list[tuple[Any, dict[str, Any]]] = [
            (MHATokenToKVPoolHost(dtype="bfloat16"), {}),
            (MHATokenToKVPoolHost(heads=1), {}),
            (MHATokenToKVPoolHost(), {"identity": KvIdentity("model", "other weights")}),
            (MHATokenToKVPoolHost(), {"identity": KvIdentity("model", "revision", "fp8")}),
            (MHATokenToKVPoolHost(), {"worker": Worker(pp_rank=0, pp_size=2)}),
            (MHATokenToKVPoolHost(), {"worker": Worker(pp_rank=1, pp_size=2)}),
            (MHATokenToKVPoolHost(), {"worker": Worker(cp_rank=1, cp_size=2)}),
            (MHATokenToKVPoolHost(), {"worker": Worker(tp_rank=0, tp_size=2)}),
        ]
        for pool, changed in differing:
            with Engine(server.endpoint, pool, **changed) as other:
                assert other.cache.find(names).pages == 0
                assert other.load(names) == [False] * 2
        assert engine.cache.find(names).pages == 2


def test_stages_of_as_many_layers_that_begin_elsewhere_share_nothing(server: ServerProcess) -> None:
    """As with SGLANG_PP_LAYER_PARTITION: the second of 3, 3, 3 layers, and of 2, 3, 4."""
    names, worker = keys(2), Worker(pp_rank=1, pp_size=3)
    even, odd = (type("MHATokenToKVPoolHost", (MHATokenToKVPoolHost,), {"start_layer": at}) for at in (3, 2))
    with Engine(server.endpoint, even(), worker=worker) as engine:
        assert engine.store(names) == [True] * 2
    with Engine(server.endpoint, odd(), worker=worker) as other:
        assert other.cache.find(names).pages == 0
    with Engine(server.endpoint, even(), worker=worker) as engine:
        assert engine.load(names) == [True] * 2


def test_a_hit_of_a_hybrid_ends_where_a_state_is(server: ServerProcess) -> None:
    names = keys(6)
    with Engine(server.endpoint, MHATokenToKVPoolHost(), MambaPoolHost()) as engine:
        assert engine.store(names) == [True] * 6
        assert engine.cache.find(names, [MAMBA]).pages == 0
        assert engine.store_state(names[1], 5) == [True]
        assert engine.store_state(names[3], 6) == [True]
        assert engine.cache.find(names, [MAMBA]) == (4, {KV: 6, "mamba": 4}, [2, 4])
        assert engine.cache.find(names[:3], [MAMBA]).pages == 2
        # A state without the keys and values before it is no hit.
        assert engine.cache.find(keys(2, seed="y") + names, [MAMBA]).pages == 0
    with Engine(server.endpoint, MHATokenToKVPoolHost(), MambaPoolHost()) as second:
        assert second.load(names[:4]) == [True] * 4
        assert second.cache.load("mamba", [names[3]], [2]) == [True]
        for index, part in enumerate(second.pools["mamba"].parts(2)):
            assert torch.equal(part, content(part, names[3], index))
        assert not any(bool(part.any()) for part in second.pools["mamba"].parts(1))
        # Two at once, as of two nodes; the second is not there.
        assert second.cache.load("mamba", [names[1], names[2]], [3, 4]) == [True, False]
    with Engine(server.endpoint, MHATokenToKVPoolHost(), MambaPoolHost(width=6)) as other:
        assert other.cache.find(names, [MAMBA]).pages == 0


def test_states_are_loaded_as_one_batch_up_to_the_first_that_is_missing(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, batches = keys(4), []
    single = WorkerAdapter.batched_submit_retrieve

    def spy(self: WorkerAdapter, requests: Any, *args: Any, **more: Any) -> Any:
        batches.append(len(requests))
        return single(self, requests, *args, **more)

    monkeypatch.setattr(WorkerAdapter, "batched_submit_retrieve", spy)
    with Engine(server.endpoint, MHATokenToKVPoolHost(), MambaPoolHost()) as engine:
        assert engine.store(names) == [True] * 4
        for place, name in enumerate([names[0], names[1], names[3]]):
            assert engine.store_state(name, place) == [True]
    with Engine(server.endpoint, MHATokenToKVPoolHost(), MambaPoolHost()) as second:
        assert second.load(names) == [True] * 4
        assert second.cache.load("mamba", names, [3, 4, 5, 6]) == [True, True, False, False]
        for place, name in [(3, names[0]), (4, names[1])]:
            for index, part in enumerate(second.pools["mamba"].parts(place)):
                assert torch.equal(part, content(part, name, index))
    assert batches[:2] == [1, 4], "pages of keys and values are one request, each state is one"


def test_a_state_of_another_shape_or_release_is_another_name(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turned round it has the same size, as another backend may keep it; in another release even the same shape."""
    names = keys(2)

    class Turned(MambaPoolHost):
        def __init__(self) -> None:
            super().__init__()
            self.temporal_buffer = self.temporal_buffer.transpose(-1, -2).contiguous()

    Turned.__name__ = "MambaPoolHost"
    assert Turned().temporal_buffer[0].numel() == MambaPoolHost().temporal_buffer[0].numel()
    with Engine(server.endpoint, MHATokenToKVPoolHost(), MambaPoolHost()) as engine:
        assert engine.store(names) == [True] * 2
        assert engine.store_state(names[1], 5) == [True]
        assert engine.cache.find(names, [MAMBA]).pages == 2
    with Engine(server.endpoint, MHATokenToKVPoolHost(), Turned()) as other:
        assert other.cache.find(names).pages == 2
        assert other.cache.find(names, [MAMBA]).pages == 0
        assert other.cache.load("mamba", names[1:], [0]) == [False]
    package = ModuleType("an_engine")
    package.__version__ = "0.5.99"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_engine", package)
    later = type("MambaPoolHost", (MambaPoolHost,), {"__module__": "an_engine.pools"})
    with Engine(server.endpoint, MHATokenToKVPoolHost(), later()) as other:
        assert other.cache.find(names).pages == 2, "keys and values are canonical"
        assert other.cache.find(names, [MAMBA]).pages == 0


def test_engines_of_a_release_that_is_only_tried_share_among_themselves(server: ServerProcess) -> None:
    """What its pools hold was not read: their layouts may have other meanings."""
    names = keys(2)
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine:
        assert engine.store(names) == [True] * 2
    with Engine(server.endpoint, MHATokenToKVPoolHost(), release="0.5.99") as tried:
        assert tried.cache.find(names).pages == 0
        assert tried.store(names) == [True] * 2
        with Engine(server.endpoint, MHATokenToKVPoolHost(), release="0.5.99") as other:
            assert other.load(names) == [True] * 2
        with Engine(server.endpoint, MHATokenToKVPoolHost(), release="0.5.100") as other:
            assert other.cache.find(names).pages == 0


def test_what_a_pool_without_registration_needs_is_no_hit(server: ServerProcess) -> None:
    names = keys(2)
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine:
        assert engine.store(names) == [True] * 2
        assert engine.cache.find(names, [MAMBA]).pages == 0
        assert engine.cache.find(names, [Transfer("indexer", "all_pages")]).pages == 0
        assert engine.cache.load("mamba", names[:1], [0]) == [False]
        assert engine.cache.store("indexer", names[:1], [0]) == [False]


@pytest.mark.engine_feature("SGLang", "sliding windows", "refused, stand-ins")
def test_windows_and_groups_of_pages_are_left_out(server: ServerProcess) -> None:
    names = keys(2)
    with Engine(server.endpoint, MHATokenToKVPoolHost(), MambaPoolHost()) as engine:
        assert engine.store(names) == [True] * 2
        assert engine.store_state(names[1], 0) == [True]
        assert engine.cache.find(names, [Transfer("mamba", "trailing_pages", ["a", "b"])]).pages == 0
        assert engine.cache.find(names, [Transfer("mamba", "block_groups")]).pages == 0


def test_an_evicted_page_ends_a_load_before_it(server: ServerProcess) -> None:
    names = keys(4)
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine, server.client() as client:
        assert engine.store(names[:2]) == [True] * 2
        assert engine.store(names[3:]) == [True]
        assert engine.load(names) == [True, True, False, False]
        wait_until(lambda: client.call("CLEAR", m.Clear()).in_use == 0, what="the pins' end")


def test_a_found_page_stays_until_it_is_loaded(server: ServerProcess) -> None:
    names = keys(3)
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine, server.client() as client:
        assert engine.store(names) == [True] * 3
        assert engine.cache.find(names).pages == 3
        client.call("CLEAR", m.Clear())
        assert engine.load(names) == [True] * 3
        wait_until(lambda: client.call("CLEAR", m.Clear()).in_use == 0, what="the pins' end")
        assert engine.load(names) == [False] * 3


def test_more_pages_than_one_question_may_have(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    names = keys(7)
    with Engine(server.endpoint, MHATokenToKVPoolHost(), MambaPoolHost()) as engine:
        assert engine.store(names[:6]) == [True] * 6
        assert engine.store_state(names[0], 0) == engine.store_state(names[4], 1) == [True]
        monkeypatch.setattr("kvf_sglang.pages.ASKED_OBJECTS", 6)  # two pages of the three groups of a state
        assert engine.cache.find(names, [MAMBA]) == (5, {KV: 6, "mamba": 5}, [1, 5])


def test_after_a_clear_only_what_is_stored_later_is_found(server: ServerProcess) -> None:
    names = keys(2)
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine:
        engine.store(names)
        engine.cache.forget()
        assert engine.cache.find(names).pages == 0
        assert engine.store(names[:1]) == [True]
        assert engine.cache.find(names).pages == 1
        with Engine(server.endpoint, MHATokenToKVPoolHost()) as other:
            assert other.cache.find(names).pages == 2


def test_what_was_found_before_a_clear_is_not_loaded_after_it(server: ServerProcess) -> None:
    names = keys(2)
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine:
        assert engine.store(names) == [True] * 2
        assert engine.cache.find(names).pages == 2
        engine.cache.forget()
        assert engine.load(names) == [False] * 2


def test_a_retired_cache_neither_loads_nor_stores(server: ServerProcess) -> None:
    names = keys(2)
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine:
        assert engine.store(names[:1]) == [True]
        engine.cache.retire("other weights")
        assert engine.cache.find(names).pages == 0
        assert engine.load(names[:1]) == [False]
        assert engine.store(names[1:]) == [False]


def test_slots_that_do_not_fit_the_pages_are_a_miss(server: ServerProcess) -> None:
    names = keys(2)
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine:
        slots = engine.pool.indices([0, 1])
        no_pages = [
            slots[:-1],
            slots + slots,
            [slot + 3 for slot in slots],
            [slots[0], *slots[9:16], *slots[8:]],
            [*reversed(slots)],
            # Of two pages in one place only the last would be there.
            slots[: pools.PAGE] * 2,
        ]
        for given in no_pages:
            assert engine.cache.store(KV, names, given) == [False] * 2
            assert engine.cache.find(names).pages == 0
        assert engine.cache.store(KV, names, slots) == [True] * 2
        for given in no_pages:
            assert engine.cache.load(KV, names, given) == [False] * 2
        with pytest.raises(ValueError, match="non-hexadecimal"):
            engine.cache.find(["no hash"])
        with pytest.raises(ValueError, match="32 bytes"):
            engine.cache.find(["ab"])


def test_a_full_l1_drops_a_store_and_serves_what_it_has() -> None:
    with ServerProcess(capacity="1MiB") as small, Engine(small.endpoint, MHATokenToKVPoolHost()) as engine:
        prompts = [keys(12, seed=str(seed)) for seed in range(90)]
        for names in prompts:
            engine.store(names)
        found = [engine.cache.find(names).pages for names in prompts]
        assert 0 < sum(found) < 90 * 12
        for names, there in zip(prompts, found, strict=True):
            loaded = engine.load(names[:there])
            assert loaded == sorted(loaded, reverse=True)


def of_turned_states() -> MambaPoolHost:
    """Its copies of the device's states keep their order."""
    pool = MambaPoolHost()
    pool.buffer_info = SimpleNamespace(conv=[turned(slots_first=False)], temporal=pool.temporal_buffer)
    return pool


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: MHATokenToKVPoolHost("page_unified"), "layout is 'page_unified'"),
        (type("DSAIndexerPoolHost", (MHATokenToKVPoolHost,), {}), "its kind has no exact conversion"),
        (type("MHATokenToKVPoolHost", (MHATokenToKVPoolHost,), {"v_head_dim": 3}), "values 3"),
        (type("MLATokenToKVPoolHost", (MLATokenToKVPoolHost,), {"dcp_size": 2}), "decode context"),
        (lambda: MambaPoolHost("layer_first"), "layout is 'layer_first'"),
        (of_turned_states, "are not laid out in the order"),
    ],
)
def test_a_pool_that_is_not_known_to_convert_is_left_out(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, make: Callable[[], Any], why: str
) -> None:
    with Engine(server.endpoint, make(), attached=False) as engine:
        assert why in caplog.text
        assert engine.cache.find(keys(2)).pages == 0
        assert engine.cache.load(KV, keys(1), list(range(pools.PAGE))) == [False]


def test_a_page_that_is_no_whole_number_of_blocks_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Wide(MHATokenToKVPoolHost):
        page_size = 16

    Wide.__name__ = "MHATokenToKVPoolHost"
    with Engine("ipc:///nowhere/s.sock", MHATokenToKVPoolHost(), attached=False) as engine:
        engine.cache.add_pool("draft", Wide())
        assert "its pages have 16 tokens, those of the page hashes 8" in caplog.text


def test_a_model_with_a_pool_that_cannot_be_kept_stores_nothing(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine:
        assert engine.store(keys(1)) == [True]
        engine.cache.add_pool("indexer", type("DSAIndexerPoolHost", (), {})())
        assert "SGLang's KV is not cached: pool indexer" in caplog.text
        assert engine.store(keys(1, seed="more")) == [False]
        assert engine.cache.find(keys(1)).pages == 0
    first = Worker(tp_rank=0, tp_size=2, replicated=True)
    with Engine(server.endpoint, MLATokenToKVPoolHost(), worker=first) as engine:
        engine.cache.add_pool("draft", MHATokenToKVPoolHost())
        assert "pool draft is not cached" in caplog.text


def test_an_engine_starts_without_a_server_and_finds_one_later() -> None:
    server = ServerProcess()
    names = keys(3)
    try:
        with Engine(server.endpoint, MHATokenToKVPoolHost(), attached=False) as engine:
            assert engine.cache.find(names).pages == 0
            assert engine.store(names) == [False] * 3
            server.start()
            wait_until(lambda: engine.store(names) == [True] * 3, what="the registration")
            server.kill9()
            assert engine.cache.find(names).pages == 0
            assert engine.load(names) == [False] * 3
            server.start()
            wait_until(lambda: engine.store(names) == [True] * 3, what="the registration again")
            assert engine.load(names) == [True] * 3
    finally:
        server.__exit__()


def test_a_server_that_hangs_costs_each_call_its_deadline_at_most() -> None:
    names = keys(2)
    with ServerProcess() as server:
        short = dict.fromkeys(("lookup_deadline_s", "load_deadline_s", "store_deadline_s"), 0.2)
        with Engine(server.endpoint, MHATokenToKVPoolHost(), deadline_scale=1.0, **short) as engine:
            wait_until(lambda: engine.store(names) == [True] * 2, what="a store")
            server.sigstop()
            # Each answers without the server, which goes on only afterwards.
            assert engine.cache.find(names).pages == 0
            assert engine.load(names) == [False] * 2
            assert engine.store(keys(2, seed="new")) == [False] * 2
            server.sigcont()
            wait_until(lambda: engine.load(names) == [True] * 2, what="a load")


def test_weights_without_a_name_keep_the_cache_off_and_say_why(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    tried = threading.Event()

    def unnamed() -> KvIdentity:
        tried.set()
        raise ConfigFieldError("the weights have no name")

    with Engine(server.endpoint, MHATokenToKVPoolHost(), identity=unnamed, attached=False) as engine:
        assert tried.wait(60)
        wait_until(lambda: "the weights have no name" in caplog.text, what="the log line")
        assert engine.cache.find(keys(1)).pages == 0


def test_a_backend_is_detached_while_its_weights_are_read(server: ServerProcess) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow() -> KvIdentity:
        reading.set()
        go_on.wait()
        return KvIdentity("model", "revision")

    slowly: dict[str, Any] = {"identity": slow, "attached": False, "deadline_scale": 100.0}
    with Engine(server.endpoint, MHATokenToKVPoolHost(), **slowly) as engine:
        assert reading.wait(60)
    thread = engine.cache._attachments._pools[KV]._thread
    assert thread.is_alive()
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert engine.cache._attachments.get(KV) is None


def test_threads_store_and_load_at_once(server: ServerProcess) -> None:
    with Engine(server.endpoint, MHATokenToKVPoolHost()) as engine:
        stored = keys(6, seed="stored")
        assert engine.store(stored) == [True] * 6
        failures: list[object] = []

        def loads() -> None:
            for _ in range(20):
                if engine.cache.find(stored).pages != 6:
                    failures.append("find")
                if engine.cache.load(KV, stored, engine.pool.indices(list(range(6)))) != [True] * 6:
                    failures.append("load")

        thread = threading.Thread(target=loads)
        thread.start()
        for number in range(20):
            engine.cache.store(KV, keys(6, seed=str(number)), engine.pool.indices(list(range(6, 12))))
        thread.join()
        assert failures == []
        for page, key in enumerate(stored):
            assert torch.equal(engine.pool.page(page), content(engine.pool.page(page), key))
