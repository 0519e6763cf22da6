"""What adapters are called: by their content, as far as somebody knows what an engine has loaded. Without vLLM."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvf_vllm import adapters
from kvf_vllm.adapters import NO_ADAPTER, Adapted, AdapterFacts, AdapterNames, AdapterReader, LoadedAdapters, adapter_of
from kvf_vllm.options import VllmOptions
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.step_messages import AdapterNews, AdapterUse, LoadOp, StepPlan, StepReport, StoreOp
from kvf_vllm.worker import WorkerSide
from kvframework.errors import ConfigFieldError
from tests.support.waiting import wait_until
from tests.vllm.stand_ins import BLOCK, SERVED, WINDOWED, Clock, FakeInstance, FakeRequest, FakeServer, computed, table

CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


@dataclass
class Lora:
    """vLLM's LoRARequest."""

    lora_path: str
    lora_name: str = "style"
    lora_int_id: int = 1


def written(folder: Path, weights: bytes = b"weights", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def content(folder: Path, *settings: str) -> str:
    return AdapterReader().content(AdapterFacts("style", 1, str(folder), settings))


# names of content


def test_a_name_says_what_is_in_the_files_and_nothing_of_where_they_lie(tmp_path: Path) -> None:
    folder = written(tmp_path / "one")
    name = content(folder)
    assert len(name) == 64
    (folder / "optimizer.state").write_bytes(b"left by the training")
    assert content(folder) == content(written(tmp_path / "two")) == name
    others = [
        content(written(tmp_path / "weights", b"weightS")),
        content(written(tmp_path / "rank", r=16)),
        content(written(tmp_path / "scaling", lora_alpha=32)),
        content(written(tmp_path / "rooted", use_rslora=True)),
        content(folder, "lora_dtype=float16"),
    ]
    (written(tmp_path / "more") / "new_embeddings.safetensors").write_bytes(b"")
    assert len({name, content(tmp_path / "more"), *others}) == 7


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "adapter_config.json").unlink(),
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000),
        lambda folder: (folder / "adapter_config.json").write_text('{"r": 0, "lora_alpha": 1}'),
        lambda folder: (folder / "adapter_config.json").write_text('{"lora_alpha": 1}'),
        lambda folder: (folder / "adapter_config.json").write_text(" " * (1 << 20) + json.dumps(CONFIG)),
    ],
)
def test_what_is_no_adapter_has_no_name(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    folder = written(tmp_path / "one")
    spoil(folder)
    with pytest.raises(ConfigFieldError, match=r"the adapter 'style' has no name by its content"):
        content(folder)


def test_an_adapter_that_is_not_in_files_has_no_name(tmp_path: Path) -> None:
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(written(tmp_path / "one")))
    lora.tensorizer_config_dict = {"tensorizer_uri": "s3://"}
    with pytest.raises(ConfigFieldError, match="not loaded from files"):
        AdapterReader().content(adapter_of(lora))


def test_files_are_read_once_unless_they_change_or_are_too_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    sha256 = adapters.hashlib.sha256

    def counted() -> Any:
        nonlocal read
        read += 1
        return sha256()

    monkeypatch.setattr(adapters.hashlib, "sha256", counted)
    reader, folder = AdapterReader(), written(tmp_path / "one")
    adapter = AdapterFacts("style", 1, str(folder))
    names = {reader.content(adapter), reader.content(adapter)}
    assert (len(names), read) == (1, 4), "just written: it may change without getting another time"
    later = adapters.time.time() + 100
    monkeypatch.setattr(adapters, "time", SimpleNamespace(time=lambda: later))
    names |= {reader.content(adapter), reader.content(adapter)}
    assert (len(names), read) == (1, 6)
    (folder / "adapter_model.safetensors").write_bytes(b"WEIGHTS")
    names.add(reader.content(adapter))
    assert (len(names), read) == (2, 7)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "one")
    sha256 = adapters.hashlib.sha256

    def disturbed() -> Any:
        with (folder / "adapter_config.json").open("a") as file:
            file.write(" ")
        return sha256()

    monkeypatch.setattr(adapters.hashlib, "sha256", disturbed)
    with pytest.raises(OSError, match="changed while it was read"):
        content(folder)


# what a worker's vLLM has loaded


@dataclass(eq=False)
class LoraConfig:
    lora_dtype: str = "float32"


@dataclass
class Adapters:
    """vLLM's manager of one engine; `while_loading` happens after it has read the files."""

    lora_config: LoraConfig
    held: set[int] = field(default_factory=set)
    while_loading: Callable[[], object] = lambda: None

    def list_adapters(self) -> set[int]:
        return set(self.held)


@pytest.fixture
def manager_class() -> type[Adapters]:
    class Manager(Adapters):
        def _load_adapter(self, request: Lora) -> str:
            text = (Path(request.lora_path) / "adapter_model.safetensors").read_text()
            self.while_loading()
            self.held.add(request.lora_int_id)
            return text

    return Manager


def watched(manager_class: Any) -> tuple[LoadedAdapters, Any]:
    config = LoraConfig()
    engine = LoadedAdapters(config)
    engine.watch(manager_class)
    return engine, manager_class(config)


def test_each_engine_of_a_process_knows_what_its_own_has_loaded(tmp_path: Path, manager_class: Any) -> None:
    (one, manager), (other, _) = watched(manager_class), watched(manager_class)
    lora = Lora(str(written(tmp_path / "one")))
    assert manager._load_adapter(lora) == "weights"
    (news,) = one.take_news().values()
    assert news is not None
    assert news == AdapterNews("style", lora.lora_path, news.content)
    assert one.holds(AdapterUse(1, news.content))
    assert not one.holds(AdapterUse(2, news.content))
    assert not one.holds(AdapterUse(1, "0" * 64))
    assert not other.holds(AdapterUse(1, news.content))
    assert one.take_news() == other.take_news() == {}


def test_what_vllm_has_dropped_is_not_held(tmp_path: Path, manager_class: Any) -> None:
    engine, manager = watched(manager_class)
    manager._load_adapter(Lora(str(written(tmp_path / "one"))))
    (news,) = engine.take_news().values()
    assert news is not None
    manager.held.clear()
    assert not engine.holds(AdapterUse(1, news.content))
    assert engine.take_news() == {1: None}
    assert engine.take_news() == {}


def test_files_that_change_while_they_are_loaded_have_no_name(
    tmp_path: Path, manager_class: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine, manager = watched(manager_class)
    folder = written(tmp_path / "one")
    manager.while_loading = lambda: written(folder, b"others!")
    manager._load_adapter(Lora(str(folder)))
    assert engine.take_news() == {1: AdapterNews("style", str(folder), "")}
    assert not engine.holds(AdapterUse(1, ""))
    assert "changed while it was loaded" in caplog.text


def test_a_load_fails_or_succeeds_as_without_the_connector(
    tmp_path: Path, manager_class: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine, manager = watched(manager_class)
    with pytest.raises(FileNotFoundError):
        manager._load_adapter(Lora(str(tmp_path / "nowhere")))
    assert engine.take_news() == {}
    folder = written(tmp_path / "one")
    (folder / "adapter_config.json").unlink()
    assert manager._load_adapter(Lora(str(folder))) == "weights"
    assert engine.take_news() == {1: AdapterNews("style", str(folder), "")}


def test_a_vllm_that_loads_otherwise_leaves_adapters_without_names(caplog: pytest.LogCaptureFixture) -> None:
    engine = LoadedAdapters(LoraConfig())
    engine.watch(object)
    assert "this vLLM's loads cannot be seen" in caplog.text
    assert not engine.holds(AdapterUse(1, "0" * 64))


@pytest.mark.parametrize(
    ("on_cpu", "slots", "is_stored"), [(True, [1], False), (True, [1, None], True), (False, [1], True)]
)
def test_what_a_cpu_may_have_computed_with_an_adapter_is_not_stored_as_without(
    tmp_path: Path, manager_class: Any, on_cpu: bool, slots: list[int | None], is_stored: bool
) -> None:
    config = LoraConfig()
    engine = LoadedAdapters(config, base_uses_last_slot=on_cpu)
    engine.watch(manager_class)
    instance = FakeInstance()
    worker = WorkerSide(instance, block_size=BLOCK, adapters=engine)

    def step(number: int) -> int:
        worker.before_step(StepPlan())
        worker.store(StepPlan(stores=[StoreOp(number, "a", 0, 8, b"", "", [[5, 6]])]))
        return len(instance.stores)

    assert step(0) == 1
    manager = manager_class(config)
    manager._adapter_manager = SimpleNamespace(lora_index_to_id=slots)
    manager._load_adapter(Lora(str(written(tmp_path / "one"))))
    assert step(1) == (2 if is_stored else 1)
    slots[:] = [None]
    assert step(2) == (3 if is_stored else 1), "vLLM's own cache may still hold it"


# names in the scheduler


def files_of(adapter: AdapterFacts) -> str:
    return f"files of {adapter.path}"


def names(workers: int = 1, read: Callable[[AdapterFacts], str] = files_of, **fields: Any) -> AdapterNames:
    return AdapterNames(workers, read=read, **fields)


def settled(names: AdapterNames, lora: Lora, request_id: str = "a") -> Adapted:
    """What becomes of a request that waits for its adapter's name."""
    found = NO_ADAPTER

    def asked() -> bool:
        nonlocal found
        found = names.adapted(request_id, lora)
        return found != NO_ADAPTER

    wait_until(asked, 20, "the name")
    return found


def test_what_the_workers_hold_counts_and_before_that_what_lies_in_the_files() -> None:
    side, lora = names(workers=2), Lora("/x")
    files = Adapted(AdapterUse(1, "files of /x"), False)
    assert settled(side, lora) == files
    side.heard(0, {1: AdapterNews("style", "/x", "files of /x")})
    assert settled(side, lora) == files, "not all of them have told"
    side.heard(1, {1: AdapterNews("style", "/x", "files of /x")})
    assert side.adapted("b", lora) == Adapted(AdapterUse(1, "files of /x"), True)
    side.heard(1, {1: None})
    assert settled(side, lora) == files


def test_workers_that_hold_different_contents_or_unknown_ones() -> None:
    side = names(workers=2)
    side.heard(0, {1: AdapterNews("style", "/x", "one"), 2: AdapterNews("b", "/y", "")})
    side.heard(1, {1: AdapterNews("style", "/x", "two"), 2: AdapterNews("b", "/y", "")})
    assert side.adapted("a", Lora("/x")).reason == "lora_unnamed"
    assert side.adapted("b", Lora("/y", "b", 2)).reason == "lora_unnamed"


@pytest.mark.parametrize(("by_path", "reason"), [(True, ""), (False, "lora_changed")])
def test_a_name_with_two_contents_is_left_out(by_path: bool, reason: str) -> None:
    side = names(by_path=by_path)
    side.heard(0, {1: AdapterNews("style", "/x", "one")})
    side.heard(0, {2: AdapterNews("style", "/x/v2", "two")})
    assert side.adapted("a", Lora("/x/v2", "style", 2)).reason == reason
    side.heard(0, {3: AdapterNews("style", "/x", "three")})
    assert side.adapted("a", Lora("/x", "style", 3)).reason == "lora_changed"
    # Files that are not loaded yet count too.
    assert settled(side, Lora("/x", "style", 4)).reason == "lora_changed"


def test_unknown_content_may_lie_in_vllms_own_cache_as_well() -> None:
    side = names()
    side.heard(0, {1: AdapterNews("style", "/x", "")})
    side.heard(0, {1: AdapterNews("style", "/x", "one")})
    assert side.adapted("a", Lora("/x")).reason == "lora_changed"


def test_files_that_cannot_be_read_and_files_that_take_long() -> None:
    def fails(adapter: AdapterFacts) -> str:
        raise OSError("no such folder")

    assert settled(names(read=fails), Lora("/x")).reason == "lora_unnamed"
    hangs, clock, server = threading.Event(), Clock(), FakeServer()

    def slow(adapter: AdapterFacts) -> str:
        hangs.wait(60)
        return "late"

    side = SchedulerSide(server, WINDOWED[:1], VllmOptions(), adapters=names(read=slow), clock=clock)
    side.heard(StepReport(served={0: SERVED}))
    request = FakeRequest("a", list(range(16)), lora_request=Lora("/x"))
    assert side.matched_tokens(request, 0) == (None, False)
    clock.now += 10
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, table(16), 0)
    assert not computed(side, request, 16).stores
    assert dict(side.tally.counts) == {"miss_requests|lora_unnamed": 1}
    hangs.set()


# requests


def scheduling(server: FakeServer, *, groups: Any = WINDOWED[:1], loaded: str = "", **roles: Any) -> SchedulerSide:
    side = SchedulerSide(server, groups, VllmOptions(), adapters=names(), **roles)
    held = {0: {1: AdapterNews("style", "/x", loaded)}} if loaded else {}
    side.heard(StepReport(served={0: SERVED}, adapters=held))
    return side


def matched(side: SchedulerSide, request: FakeRequest) -> tuple[int | None, bool]:
    answer: tuple[int | None, bool] = (None, False)

    def asked() -> bool:
        nonlocal answer
        answer = side.matched_tokens(request, 0)
        return answer[0] is not None

    wait_until(asked, 20, "the adapter's name")
    return answer


def requested(request_id: str, path: str = "/x") -> FakeRequest:
    return FakeRequest(request_id, list(range(16)), lora_request=Lora(path))


def stored(server: FakeServer) -> list[StoreOp]:
    side, request = scheduling(server), requested("first")
    assert matched(side, request) == (0, False)
    stores = computed(side, request, 16).stores
    for op in stores:
        server.stored(op)
    return stores


def test_kv_of_an_adapter_is_found_with_it_and_not_without() -> None:
    server = FakeServer()
    (op,) = stored(server)
    assert op.adapter == AdapterUse(1, "files of /x")
    side = scheduling(server, loaded="files of /x")
    request = requested("a")
    assert matched(side, request) == (16, True)
    side.allocated(request, table(16), 16)
    (load,) = computed(side, request, 1, table(17)).loads
    assert (load.adapter, load.in_step) == (op.adapter, False)
    assert side.matched_tokens(FakeRequest("base", list(range(16))), 0) == (0, False)
    assert scheduling(server, loaded="other").matched_tokens(requested("a"), 0) == (0, False)


def test_an_adapter_that_is_not_loaded_yet_waits_for_its_step() -> None:
    server = FakeServer()
    stored(server)
    side, request = scheduling(server), requested("a")
    # Within the step, which must compute something.
    assert matched(side, request) == (8, False)
    side.allocated(request, table(16), 8)
    (load,) = computed(side, request, 8, table(16)).loads
    assert load.in_step
    state = replace(WINDOWED[0], state=True)
    for groups in (WINDOWED, (state,)):
        between = scheduling(server, groups=groups)
        assert matched(between, requested("b")) == (0, False), "vLLM loads these between steps only"
        between.allocated(requested("b"), [*table(16), *table(16)][: len(groups)], 0)
        assert dict(between.tally.counts) == {"miss_requests|lora_not_loaded": 1}


def test_a_role_that_only_stores_waits_for_the_name_too() -> None:
    server = FakeServer()
    side, request = scheduling(server, loads=False), requested("a")
    assert matched(side, request) == (0, False)
    assert [op.adapter for op in computed(side, request, 16).stores] == [AdapterUse(1, "files of /x")]


def test_a_request_whose_adapter_is_another_after_a_preemption_is_left_out() -> None:
    server = FakeServer()
    side, request = scheduling(server, loaded="one"), requested("a")
    assert matched(side, request) == (0, False)
    side.heard(StepReport(adapters={0: {1: AdapterNews("style", "/x", "two")}}))
    assert matched(side, request) == (0, False)
    assert not computed(side, request, 16).stores
    side.allocated(request, table(16), 0)
    assert dict(side.tally.counts) == {"miss_requests|lora_changed": 1}


@pytest.mark.parametrize("holds", [True, False])
def test_a_worker_moves_nothing_under_the_name_of_what_it_does_not_hold(
    tmp_path: Path, manager_class: Any, holds: bool
) -> None:
    engine, manager = watched(manager_class)
    manager._load_adapter(Lora(str(written(tmp_path / "one"))))
    instance = FakeInstance()
    worker = WorkerSide(instance, block_size=BLOCK, adapters=engine)
    (news,) = worker.take_report().adapters[0].values()
    assert news is not None
    use = AdapterUse(1, news.content if holds else "0" * 64)
    load = LoadOp("a", 0, 16, 0, b"d" * 64, "", [[1, 2, 3, 4]], in_step=True, adapter=use)
    worker.load(StepPlan(loads=[load]))
    assert worker.finished_loads() == (set(), set()), "it was loaded within the step"
    assert worker.take_failed_blocks() == (set() if holds else {1, 2, 3, 4})
    worker.before_step(StepPlan())
    store = StoreOp(0, "a", 0, 8, b"", "", [[5, 6]], adapter=use)
    worker.store(StepPlan(stores=[store]))
    assert (len(instance.loads), len(instance.stores)) == ((1, 1) if holds else (0, 0))
    assert worker.take_report().stored == ({0: 1} if holds else {0: 0})
    second = replace(load, adapter=None)
    worker.load(StepPlan(loads=[second]))
    assert worker.take_failed_blocks() == set()
