"""SGLang's view of the backend and of the linker: nothing that is called raises, whatever is wrong, and what is right
gets through; a load of the linker is complete when it is true, and one that fails is refused."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvframework.client import ModelFacts
from tests.sglang import fake_sglang, pools
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang itself is here, see test_engine"),
]

FACTS = ModelFacts("model", "", "", "dummy", 0, {}, "torch.float32", {})


server = server_fixture(scope="module")


class Transfer:
    def __init__(self, name: str, names: list[str] | None = None, indices: Any = None) -> None:
        self.name, self.keys, self.host_indices = name, names, indices
        self.hit_policy = pools.Policy("trailing_pages")


def storage(
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any] | None,
    *,
    facts: Callable[[str], ModelFacts] = lambda _engine: FACTS,
    version: str = "0.5.23",
    **config: Any,
) -> Any:
    fake_sglang.install(monkeypatch, version)
    module = importlib.import_module("kvf_sglang.storage")
    # Of the fake, which has no methods.
    monkeypatch.setattr(module, "model_facts", facts)
    return module.KvFrameworkStorage(fake_sglang.StorageConfig(extra, **config), {})


def every_call(backend: Any) -> list[object]:
    pool, names = pools.MHATokenToKVPoolHost(), pools.keys(2)
    indices = torch.arange(2 * pools.PAGE)
    transfers = [Transfer("mamba", names[:1], torch.arange(1)), Transfer("kv", None)]
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, "kv")
    backend.register_mem_host_pool_v2(pools.MambaPoolHost(), "mamba")
    exists = backend.batch_exists_v2(names, transfers)
    answers = [
        exists.kv_hit_pages,
        exists.extra_pool_hit_pages,
        backend.batch_exists(names),
        backend.exists(names[0]),
        backend.batch_get_v1(names, indices),
        backend.batch_set_v1(names, indices),
        backend.batch_get_v2(transfers),
        backend.batch_set_v2(transfers),
        backend.get(names[0]),
        backend.batch_get(names),
        backend.set(names[0]),
        backend.batch_set(names),
    ]
    backend.clear()
    backend.get_stats()
    backend.close()
    backend.close()
    return answers


MISSES = [
    0,
    {},
    0,
    False,
    [False] * 2,
    [False] * 2,
    {"mamba": [False], "kv": []},
    {"mamba": [False], "kv": []},
    None,
    [None] * 2,
    False,
    False,
]


def unreadable(_engine: str) -> ModelFacts:
    raise RuntimeError("SGLang has other settings now")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"extra": None, "facts": unreadable}, "SGLang has other settings now"),
        ({"extra": {"kvframework.endpiont": "x"}}, "backend-extra-config: unknown option kvframework.endpiont"),
        ({"extra": {"kvframework.endpoint": "http://x"}}, "http://x"),
        ({"extra": {}, "version": "0.4.0"}, "SGLang 0.4.0"),
    ],
    ids=["facts", "option", "endpoint", "release"],
)
def test_a_backend_that_cannot_serve_says_why_and_misses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: dict[str, Any], why: str
) -> None:
    backend = storage(monkeypatch, **given)
    assert why in caplog.text
    assert every_call(backend) == MISSES


def test_without_a_server_everything_is_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = storage(monkeypatch, {"kvframework.endpoint": f"ipc://{tmp_path}/s"})
    assert every_call(backend) == MISSES
    assert not backend.errors


def test_an_error_inside_is_a_miss_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    backend = storage(monkeypatch, {"kvframework.endpoint": f"ipc://{tmp_path}/s"})
    cache = backend.cache

    def broken(*_args: object, **_kwargs: object) -> None:
        raise OSError("no thread is left")

    for name in ("find", "load", "store", "add_pool", "forget"):
        monkeypatch.setattr(cache, name, broken)
    monkeypatch.setattr(cache.tally, "take", broken)
    try:
        assert every_call(backend) == MISSES
        assert backend.batch_exists(pools.keys(1)) == 0
        assert sum("batch_exists failed" in line for line in caplog.messages) == 1
        assert backend.errors["batch_exists: OSError"] == 2
    finally:
        cache.close()


def test_pages_that_are_no_hashes_are_a_miss(monkeypatch: pytest.MonkeyPatch, server: ServerProcess) -> None:
    backend = storage(monkeypatch, {"kvframework.endpoint": server.endpoint})
    backend.register_mem_pool_host(pools.MHATokenToKVPoolHost())
    wait_until(lambda: backend.cache._of("kv"), what="the registration")
    assert backend.batch_exists(["__placeholder__"]) == 0
    assert backend.batch_get_v1(["__placeholder__"], torch.arange(pools.PAGE)) == [False]
    assert backend.errors == {"batch_exists: ValueError": 1, "batch_get_v1: ValueError": 1}
    backend.close()


def test_what_is_stored_is_found_and_loaded(monkeypatch: pytest.MonkeyPatch, server: ServerProcess) -> None:
    extra: dict[str, Any] = {"kvframework.endpoint": server.endpoint, "kvframework.deadline_scale": 20.0}
    extra |= {f"kvframework.{name}_deadline_s": 10.0 for name in ("lookup", "load", "store")}
    backend = storage(monkeypatch, extra)
    assert extra["interface_v1"] == 1
    pool, states, names = pools.MHATokenToKVPoolHost(), pools.MambaPoolHost(), pools.keys(3)
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(states, "mamba")
    wait_until(lambda: backend.cache._of("kv") and backend.cache._of("mamba"), what="the registration")
    for page, key in enumerate(names):
        pool.page(page).copy_(pools.content(pool.page(page), key))
    for number, part in enumerate(states.parts(4)):
        part.copy_(pools.content(part, names[1], number))
    state = Transfer("mamba", names[1:2], torch.tensor([4]))
    assert backend.batch_set_v2([state]) == {"mamba": [True]}
    assert backend.batch_set_v1(names, torch.arange(3 * pools.PAGE)) == [True] * 3
    found = backend.batch_exists_v2(names, [Transfer("mamba", ["__placeholder__"])])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [2])
    # Found by SGLang's own names, whose hashes are not those of their texts.
    assert [found.extra_pool_hit_pages[name] for name in fake_sglang.PoolName] == [3, 2]
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1(names[:2], torch.arange(5 * pools.PAGE, 7 * pools.PAGE)) == [True] * 2
    assert all(torch.equal(pool.page(5 + page), pools.content(pool.page(5), names[page])) for page in (0, 1))
    assert backend.batch_get_v2([Transfer("mamba", names[1:2], torch.tensor([0]))]) == {"mamba": [True]}
    assert all(torch.equal(part, pools.content(part, names[1], number)) for number, part in enumerate(states.parts(0)))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([1, 3], [2, 1])
    assert len(stats.backup_bandwidth) == 2
    assert backend.get_stats().backup_pgs == []
    backend.close()


def test_an_update_of_the_weights_ends_it(monkeypatch: pytest.MonkeyPatch, server: ServerProcess) -> None:
    backend = storage(monkeypatch, {"kvframework.endpoint": server.endpoint})
    backend.register_mem_pool_host(pools.MHATokenToKVPoolHost())
    wait_until(lambda: backend.cache._of("kv"), what="the registration")
    module = sys.modules["sglang.srt.model_executor.model_runner_components.weight_updater"]
    updater = module.WeightUpdater()
    assert updater.update_weights_from_disk("new") == "new"
    assert updater.updated == ["new"]
    assert backend.batch_set_v1(pools.keys(1), torch.arange(pools.PAGE)) == [False]
    backend.close()
    # Detached and attached again: the files are no longer what the engine computes with.
    again = sys.modules["kvf_sglang.storage"].KvFrameworkStorage(
        fake_sglang.StorageConfig({"kvframework.endpoint": server.endpoint}), {}
    )
    again.register_mem_pool_host(pools.MHATokenToKVPoolHost())
    wait_until(lambda: again.cache._attachments.get("kv"), what="the registration")
    assert again.batch_set_v1(pools.keys(1), torch.arange(pools.PAGE)) == [False]
    again.close()


class Moved:
    def __init__(self, name: str, names: list[str], indices: list[int] | None = None) -> None:
        self.name, self.keys = name, names
        self.hit_policy = pools.Policy("all_pages" if name == "kv" else "trailing_pages")
        self.device_indices = torch.tensor(indices or [])


def parameters(kv: Any, mamba: Any, **more: Any) -> Any:
    given = {"pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "tp_cache_group": None, **more}
    allocator = SimpleNamespace(get_kvcache=lambda: kv)
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator, req_to_token_pool=SimpleNamespace(mamba_pool=mamba), **given
    )


def linker(
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    *,
    version: str = "0.5.23",
    facts: Callable[[str], ModelFacts] = lambda _engine: FACTS,
    components: tuple[str, ...] = ("FULL", "MAMBA"),
    **more: Any,
) -> Any:
    fake_sglang.install(monkeypatch, version)
    module = importlib.import_module("kvf_sglang.linker")
    monkeypatch.setattr(module, "model_facts", facts)
    given = parameters(pools.MHATokenToKVPool(), pools.MambaPool(), **more)
    named = [SimpleNamespace(name=each) for each in components]
    return module.KvFrameworkLinker(None, given, components=named, extra_config=extra, forward_stream=None)


def every_linker_call(made: Any) -> list[object]:
    names = pools.keys(2)
    transfers = [Moved("kv", names, list(range(2 * pools.PAGE))), Moved("mamba", names[1:], [0])]
    answers = [
        made.lookup("r", transfers),
        made.load("r", transfers),
        made.start_layer_wise_loading(),
        made.finish_layer_wise_loading(-1),
        made.cancel_queued_load("r"),
        made.offload(transfers, session_id="s"),
        made.num_completed_offloads(),
        made.pop_completed_offload(),
    ]
    made.reset()
    made.close()
    made.close()
    assert made.pools
    assert made.layer_done_counter is not None
    return answers


LINKER_MISSES = [[], False, -1, True, True, False, 0, False]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"extra": {}, "facts": unreadable}, "SGLang has other settings now"),
        ({"extra": {"kvframework.endpiont": "x"}}, "linker-config: unknown option kvframework.endpiont"),
        ({"extra": {}, "version": "0.5.24"}, "is not supported: its linker interface changes with each release"),
        ({"extra": {}, "pp_size": 2}, "pipeline parallelism"),
        ({"extra": {}, "components": ("FULL", "SWA")}, "a cache of FULL, SWA"),
    ],
    ids=["facts", "option", "release", "pp", "window"],
)
def test_a_linker_that_cannot_serve_says_why_and_misses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: dict[str, Any], why: str
) -> None:
    made = linker(monkeypatch, **given)
    assert why in caplog.text
    assert every_linker_call(made) == LINKER_MISSES


def test_a_linker_without_a_server_misses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = linker(monkeypatch, {"kvframework.endpoint": f"ipc://{tmp_path}/s"})
    assert every_linker_call(made) == LINKER_MISSES
    assert not made.errors


def test_an_error_inside_a_linker_is_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = linker(monkeypatch, {"kvframework.endpoint": f"ipc://{tmp_path}/s"})
    cache = made.cache

    def broken(*_args: object, **_kwargs: object) -> None:
        raise OSError("no thread is left")

    for name in ("find", "load", "attached"):
        monkeypatch.setattr(cache, name, broken)
    monkeypatch.setattr(made._offloads, "quiesce", broken)
    try:
        assert every_linker_call(made) == LINKER_MISSES
        assert set(made.errors) == {"lookup: OSError", "_load: OSError", "offload: OSError", "reset: OSError"}
    finally:
        cache.close()


def test_what_is_offloaded_is_found_and_loaded(monkeypatch: pytest.MonkeyPatch, server: ServerProcess) -> None:
    extra = {f"kvframework.{name}_deadline_s": 10.0 for name in ("lookup", "load", "store")}
    made = linker(monkeypatch, {"kvframework.endpoint": server.endpoint, "kvframework.deadline_scale": 20.0, **extra})
    monkeypatch.setattr("kvf_sglang.linker.LOOKUP_S", 10.0)
    wait_until(lambda: made.cache.attached("kv") and made.cache.attached("mamba"), what="the registration")
    names, (kv, mamba) = pools.keys(3), made.pools.values()
    for page, key in enumerate(names, start=1):
        kv.fill(page, key)
    for index, part in enumerate(mamba.parts(2)):
        part.copy_(pools.content(part, names[1], index))
    assert made.offload([Moved("kv", names, kv.indices([1, 2, 3])), Moved("mamba", names[1:2], [2])])
    wait_until(lambda: made.num_completed_offloads() == 1, what="the store")
    assert made.pop_completed_offload() is True
    asked = [Moved("kv", names), Moved("mamba", names[2:])]
    assert made.lookup("r", asked) == [2]
    wanted = [Moved("kv", names[:2], kv.indices([7, 5])), Moved("mamba", names[1:2], [4])]
    assert made.load("r", wanted)
    assert all(
        torch.equal(kv.page(page), pools.content(kv.page(page), key)) for page, key in zip([7, 5], names, strict=False)
    )
    assert all(torch.equal(part, pools.content(part, names[1], at)) for at, part in enumerate(mamba.parts(4)))
    # One part that is missing refuses all of it.
    assert not made.load("r", [Moved("kv", names[:1], kv.indices([8])), Moved("mamba", names[:1], [5])])
    assert not made.errors
    made.close()
