"""What adapters are called: by their content, as far as somebody knows what an engine has loaded. Without vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvf_vllm import adapters
from kvf_vllm.adapters import AdapterFacts, AdapterNames, AdapterReader, LoadedAdapters, adapter_of
from kvf_vllm.step_messages import AdapterNews, AdapterUse, StepPlan, StepReport, TransferOp
from kvf_vllm.worker import WorkerSide
from kvframework.errors import ConfigFieldError
from tests.vllm.stand_ins import BLOCK, FakeInstance, FakeRequest, FakeServer, computed, scheduler, table

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
    with pytest.raises(ConfigFieldError, match=r"the adapter 'style' cannot be named by its content"):
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
    assert "changed while vLLM loaded it, so its requests are computed" in caplog.text


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
    assert "requests with adapters are computed, because this vLLM does not report adapter loads:" in caplog.text
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
        worker.store(StepPlan(stores=[TransferOp("a", 0, 8, b"", "", [[5, 6]], number=number)]))
        return len(instance.stores)

    assert step(0) == 1
    manager = manager_class(config)
    manager._adapter_manager = SimpleNamespace(lora_index_to_id=slots)
    manager._load_adapter(Lora(str(written(tmp_path / "one"))))
    assert step(1) == (2 if is_stored else 1)
    slots[:] = [None]
    assert step(2) == (3 if is_stored else 1), "vLLM's own cache may still hold it"


@pytest.mark.parametrize(
    ("contents", "found"),
    [
        (["one"], "lora_not_loaded"),
        (["one", "one"], AdapterUse(1, "one")),
        (["one", "two"], "lora_unnamed"),
        (["", ""], "lora_unnamed"),
    ],
)
def test_an_adapter_has_the_name_that_all_workers_tell(contents: list[str], found: AdapterUse | str) -> None:
    side, lora = AdapterNames(2), Lora("/x")
    assert side.use_of(lora) == "lora_not_loaded"
    for worker, each in enumerate(contents):
        side.heard(worker, {1: AdapterNews("style", "/x", each)})
    assert side.use_of(lora) == found
    side.heard(0, {1: None})
    assert side.use_of(lora) == "lora_not_loaded"


@pytest.mark.parametrize(("by_path", "found"), [(True, AdapterUse(2, "two")), (False, "lora_changed")])
def test_a_name_with_two_contents_is_left_out(by_path: bool, found: AdapterUse | str) -> None:
    side = AdapterNames(1, by_path=by_path)
    side.heard(0, {1: AdapterNews("style", "/x", "one")})
    side.heard(0, {2: AdapterNews("style", "/x/v2", "two")})
    assert side.use_of(Lora("/x/v2", "style", 2)) == found
    side.heard(0, {3: AdapterNews("style", "/x", "three")})
    assert side.use_of(Lora("/x", "style", 3)) == "lora_changed"


def test_unknown_content_may_lie_in_vllms_own_cache_as_well() -> None:
    side = AdapterNames(1)
    side.heard(0, {1: AdapterNews("style", "/x", "")})
    side.heard(0, {1: AdapterNews("style", "/x", "one")})
    assert side.use_of(Lora("/x")) == "lora_changed"


def loaded(content: str) -> StepReport:
    return StepReport(adapters={0: {1: AdapterNews("style", "/x", content)}})


def requested(request_id: str, tokens: int = 16) -> FakeRequest:
    return FakeRequest(request_id, list(range(tokens)), lora_request=Lora("/x"))


def test_kv_of_an_adapter_is_stored_once_it_is_loaded_and_found_with_it_alone() -> None:
    server = FakeServer()
    side, request = scheduler(server), requested("first", 17)
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, table(17), 0)
    assert not computed(side, request, 16).stores, "the step loads the adapter"
    side.heard(loaded("one"))
    (op,) = computed(side, request, 1).stores
    assert (op.start, op.end, op.adapter) == (0, 16, AdapterUse(1, "one"))
    server.stored(op)
    assert dict(side.tally.counts) == {"miss_requests|lora_not_loaded": 1}
    found = requested("a")
    assert side.matched_tokens(found, 0) == (16, True)
    side.allocated(found, table(16), 16)
    (load,) = computed(side, found, 1, table(17)).loads
    assert load.adapter == op.adapter
    assert side.matched_tokens(FakeRequest("base", list(range(16))), 0) == (0, False)
    other = scheduler(server)
    other.heard(loaded("other"))
    assert other.matched_tokens(requested("a"), 0) == (0, False)


def test_a_request_whose_adapter_is_another_after_a_preemption_is_left_out() -> None:
    side, request = scheduler(FakeServer()), requested("a")
    side.heard(loaded("one"))
    assert side.matched_tokens(request, 0) == (0, False)
    side.heard(loaded("two"))
    assert side.matched_tokens(request, 0) == (0, False)
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
    use = AdapterUse(1, news.content if holds else "0" * 64)
    load = TransferOp("a", 0, 16, b"d" * 64, "", [[1, 2, 3, 4]], adapter=use)
    worker.load(StepPlan(loads=[load]))
    assert worker.finished_loads() == ({"a"}, set())
    assert worker.take_failed_blocks() == (set() if holds else {1, 2, 3, 4})
    worker.before_step(StepPlan())
    store = TransferOp("a", 0, 8, b"", "", [[5, 6]], adapter=use)
    worker.store(StepPlan(stores=[store]))
    assert (len(instance.loads), len(instance.stores)) == ((1, 1) if holds else (0, 0))
    assert worker.take_report().stored == ({0: 1} if holds else {0: 0})
    second = replace(load, adapter=None)
    worker.load(StepPlan(loads=[second]))
    assert worker.take_failed_blocks() == set()
