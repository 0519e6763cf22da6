"""SGLang's view of the linker: nothing that is called raises, a load is complete when it is true, and one that fails is
refused."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvframework.client import ModelFacts
from tests.sglang import fake_sglang
from tests.sglang.pools import PAGE, MambaPool, MHATokenToKVPool, Policy, content, keys
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is not None, reason="SGLang itself is here, see test_linker_engine"
    ),
]

FACTS = ModelFacts("model", "", "", "dummy", 0, {}, "torch.float32", {})


class Transfer:
    def __init__(self, name: str, names: list[str], indices: list[int] | None = None) -> None:
        self.name, self.keys = name, names
        self.hit_policy = Policy("all_pages" if name == "kv" else "trailing_pages")
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
    given = parameters(MHATokenToKVPool(), MambaPool(), **more)
    named = [SimpleNamespace(name=each) for each in components]
    return module.KvFrameworkLinker(None, given, components=named, extra_config=extra, forward_stream=None)


def every_call(made: Any) -> list[object]:
    names = keys(2)
    transfers = [Transfer("kv", names, list(range(2 * PAGE))), Transfer("mamba", names[1:], [0])]
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


MISSES = [[], False, -1, True, True, False, 0, False]


def unreadable(_engine: str) -> ModelFacts:
    raise RuntimeError("SGLang has other settings now")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"extra": {}, "facts": unreadable}, "SGLang has other settings now"),
        (
            {"extra": {"kvframework.endpiont": "x"}},
            (
                "open failed, the engine continues without the cache there: [config.field] linker_extra_config of "
                "--unified-cache-external-linker-config: there is no option kvframework.endpiont"
            ),
        ),
        ({"extra": {}, "version": "0.5.24"}, "the interface of linkers changes"),
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
    assert every_call(made) == MISSES


def test_without_a_server_everything_is_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = linker(monkeypatch, {"kvframework.endpoint": f"ipc://{tmp_path}/s"})
    assert every_call(made) == MISSES
    assert not made.errors


def test_an_error_inside_is_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = linker(monkeypatch, {"kvframework.endpoint": f"ipc://{tmp_path}/s"})
    cache = made.cache

    def broken(*_args: object, **_kwargs: object) -> None:
        raise OSError("no thread is left")

    for name in ("find", "load", "attached"):
        monkeypatch.setattr(cache, name, broken)
    monkeypatch.setattr(made._offloads, "quiesce", broken)
    try:
        assert every_call(made) == MISSES
        assert set(made.errors) == {"lookup: OSError", "_load: OSError", "offload: OSError", "reset: OSError"}
    finally:
        cache.close()


def test_what_is_offloaded_is_found_and_loaded(monkeypatch: pytest.MonkeyPatch, server: ServerProcess) -> None:
    extra = {f"kvframework.{name}_deadline_s": 10.0 for name in ("lookup", "load", "store")}
    made = linker(monkeypatch, {"kvframework.endpoint": server.endpoint, "kvframework.deadline_scale": 20.0, **extra})
    monkeypatch.setattr("kvf_sglang.linker.LOOKUP_S", 10.0)
    wait_until(lambda: made.cache.attached("kv") and made.cache.attached("mamba"), what="the registration")
    names, (kv, mamba) = keys(3), made.pools.values()
    for page, key in enumerate(names, start=1):
        kv.fill(page, key)
    for index, part in enumerate(mamba.parts(2)):
        part.copy_(content(part, names[1], index))
    assert made.offload([Transfer("kv", names, kv.indices([1, 2, 3])), Transfer("mamba", names[1:2], [2])])
    wait_until(lambda: made.num_completed_offloads() == 1, what="the store")
    assert made.pop_completed_offload() is True
    asked = [Transfer("kv", names), Transfer("mamba", names[2:])]
    assert made.lookup("r", asked) == [2]
    wanted = [Transfer("kv", names[:2], kv.indices([7, 5])), Transfer("mamba", names[1:2], [4])]
    assert made.load("r", wanted)
    assert all(
        torch.equal(kv.page(page), content(kv.page(page), key)) for page, key in zip([7, 5], names, strict=False)
    )
    assert all(torch.equal(part, content(part, names[1], at)) for at, part in enumerate(mamba.parts(4)))
    # One part that is missing refuses all of it.
    assert not made.load("r", [Transfer("kv", names[:1], kv.indices([8])), Transfer("mamba", names[:1], [5])])
    assert not made.errors
    made.close()
