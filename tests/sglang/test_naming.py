"""What names an SGLang engine's KV: options, the model's facts, its files and adapters, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvf_sglang.cache import Worker
from kvf_sglang.facts import CHANGING, identify, model_facts
from kvf_sglang.options import FINGERPRINT, KNOWN, SglangOptions, check_version, parse_options
from kvframework.client import ModelFacts, changed_since, fingerprint, model_files
from kvframework.errors import ConfigFieldError, VersionMismatch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    names = ("config.json", "model.safetensors", "more.bin", "optimizer.pt", "preprocessor_config.json", "modeling.py")
    for name in names:
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def facts(model: Path) -> ModelFacts:
    return ModelFacts(
        name=str(model),
        revision="",
        quantization="",
        load_format="auto",
        seed=0,
        config={"hidden_size": 8, "transformers_version": "5"},
        dtype="torch.float32",
        settings={},
        files=model_files(str(model)),
        engine="e1",
    )


def test_the_files_of_a_model(model: Path, tmp_path: Path) -> None:
    assert [path.name for path in model_files(str(model))] == [
        "model.safetensors",
        "more.bin",
        "preprocessor_config.json",
    ]
    assert {*model_files(str(model), code=True)} - {*model_files(str(model))} == {model / "modeling.py"}
    assert model_files(str(tmp_path / "nowhere")) == ()
    (tmp_path / "empty").mkdir()
    assert model_files(str(tmp_path / "empty")) == ()
    shards = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for shard in (*shards, tmp_path / "other.gguf"):
        shard.write_text(shard.name)
    assert model_files(str(shards[0])) == tuple(shards)
    assert model_files(str(tmp_path / "other.gguf")) == (tmp_path / "other.gguf",)


def test_content_is_named_wherever_it_lies(model: Path, tmp_path: Path) -> None:
    before = fingerprint(model_files(str(model)))
    moved = model.rename(tmp_path / "elsewhere")
    assert fingerprint(model_files(str(moved))) == before
    (moved / "model.safetensors").write_text("other weights")
    assert fingerprint(model_files(str(moved))) != before


def test_files_that_changed_are_told(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    assert changed_since([weights], weights.stat().st_mtime + 60) == []
    assert changed_since([weights], weights.stat().st_mtime - 60) == [weights]
    blob = tmp_path / "models--a--b" / "blobs" / "1234"
    blob.parent.mkdir(parents=True)
    blob.write_text("weights")
    hubs, link = model / "hubs.safetensors", model / "link.safetensors"
    hubs.symlink_to(blob)
    link.symlink_to(weights)
    assert changed_since([hubs, link], 0.0) == [link]


def test_a_link_to_other_files_is_a_change(model: Path, tmp_path: Path) -> None:
    """As of deployments that name the current checkpoint by a link: the files themselves are old."""
    weights = model / "model.safetensors"
    later = weights.stat().st_ctime + 60
    current = tmp_path / "current"
    current.symlink_to(model)
    assert changed_since([current / weights.name], later) == []
    os.utime(current, (later + 60, later + 60), follow_symlinks=False)
    assert changed_since([current / weights.name], later) == [current / weights.name]


def test_all_that_changes_kv_is_in_the_name(facts: ModelFacts, model: Path) -> None:
    names = {identify(facts)}
    for changed in (
        {"dtype": "torch.bfloat16"},
        {"quantization": "fp8"},
        {"revision": "main"},
        {"config": {"hidden_size": 16}},
        {"settings": {"kv_cache_dtype": "fp8_e4m3"}},
        {"draft": facts},
        {"adapters": {"a": model_files(str(model))}},
        {"adapters": {"b": model_files(str(model))}},
        {"name": "other"},
        {"started": 0.0},
        {"started": 0.0, "engine": "e2"},
    ):
        names.add(identify(replace(facts, **changed)))  # type: ignore[arg-type]
    names |= {identify(facts, weights="mine"), identify(facts, model="called otherwise")}
    (model / "model.safetensors").write_text("retrained in place")
    names.add(identify(facts))
    assert len(names) == 15
    # What may differ between two loads of the same model.
    assert identify(replace(facts, config={"hidden_size": 8, "transformers_version": "6"})) == identify(facts)


@pytest.mark.parametrize(
    "changed",
    [
        {"mm_process_config": {"image": {"image_mean": [0, 0, 0]}}},
        {"modelopt_quant": "fp8"},
        {"quantize_and_serve": True},
        {"forward_hooks": [{"name": "steer"}]},
        {"lora_target_modules": {"q_proj"}},
    ],
    ids=str,
)
def test_options_that_change_what_the_files_compute_are_in_the_name(
    monkeypatch: pytest.MonkeyPatch, model: Path, changed: dict[str, Any]
) -> None:
    assert facts_of(monkeypatch, model).settings != facts_of(monkeypatch, model, **changed).settings
    # What is off is falsy, as in engines that have no such option.
    assert not any(facts_of(monkeypatch, model, **dict.fromkeys(CHANGING)).settings.values())


def test_a_set_is_named_in_one_order(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    facts = facts_of(monkeypatch, model, lora_target_modules={"v_proj", "q_proj", "k_proj"})
    assert facts.settings["lora_target_modules"] == "['k_proj', 'q_proj', 'v_proj']"


@pytest.mark.parametrize("option", ["kt_weight_path", "modelopt_checkpoint_restore_path", "rl_quant_profile"])
def test_weights_from_elsewhere_have_no_name_of_their_own(
    monkeypatch: pytest.MonkeyPatch, model: Path, option: str
) -> None:
    assert facts_of(monkeypatch, model).files
    with pytest.raises(ConfigFieldError, match=", so their content cannot be named"):
        identify(facts_of(monkeypatch, model, **{option: "/elsewhere"}))


@pytest.mark.sglang
def test_the_options_are_those_of_sglang() -> None:
    from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER

    assert {*CHANGING} <= {*POSITIONAL_FIELD_ORDER}


def facts_of(monkeypatch: pytest.MonkeyPatch, model: Path, **options: object) -> ModelFacts:
    """The facts of an engine that was started with these options, by stand-ins for SGLang's configuration."""
    args = SimpleNamespace(
        model_path=str(model),
        revision=None,
        load_format="auto",
        random_seed=0,
        download_dir=None,
        trust_remote_code=False,
        kv_cache_dtype="auto",
        json_model_override_args="{}",
        **options,
    )
    config = SimpleNamespace(quantization=None, dtype="float32", hf_config=SimpleNamespace(to_dict=dict))
    for name, content in {
        "sglang.srt.arg_groups.model_override_base": {"resolving_view": lambda given: given},
        "sglang.srt.runtime_context": {"get_server_args": lambda: args},
        "sglang.srt.configs.model_config": {"ModelConfig": SimpleNamespace(from_server_args=lambda _args: config)},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("kvf_sglang.facts._config", lambda *_given: {"hidden_size": 8})
    return model_facts("engine")


@pytest.mark.engine_feature("SGLang", "LoRA", "stand-ins")
def test_an_adapter_that_was_trained_again_is_another_name(facts: ModelFacts, tmp_path: Path) -> None:
    """SGLang's page hashes hold its name and path only."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (adapter / "adapter_model.safetensors").write_text("first")

    def name(weights: str = "") -> object:
        return identify(replace(facts, adapters={"a": model_files(str(adapter))}), model="m", weights=weights)

    first, named = name(), name("mine")
    (adapter / "adapter_model.safetensors").write_text("second")
    assert name() != first
    assert name("mine") != named
    second = name()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 16}))
    assert name() != second


def test_an_adapter_that_changes_after_the_engine_has_started_names_kv_of_its_own(
    facts: ModelFacts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang may have loaded what its files held before; also where the user names the weights."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_text("first")
    written = (adapter / "adapter_model.safetensors").stat().st_mtime

    def name(engine: str, started: float) -> object:
        adapted = replace(facts, adapters={"a": model_files(str(adapter))}, engine=engine, started=started, files=())
        return identify(adapted, model="m", weights="mine")

    assert name("e1", written + 1) == name("e2", written + 1)
    assert not caplog.records
    assert len({name("e1", written + 1), name("e1", written - 1), name("e2", written - 1)}) == 3
    assert "changed after this engine started: no other engine shares its KV until it restarts" in caplog.text


def test_dummy_weights_are_named_by_their_seed(facts: ModelFacts) -> None:
    dummies = [identify(replace(facts, load_format="dummy", seed=seed, files=())) for seed in (1, 2)]
    assert dummies[0] != dummies[1]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"files": ()}, "not local files"),
        ({"load_format": "remote"}, "loaded as 'remote'"),
        ({"files": (Path("/nowhere/model.safetensors"),)}, "cannot be read"),
        ({"adapters": {"a": ()}}, "adapter a"),
    ],
)
def test_what_has_no_name_is_refused(facts: ModelFacts, changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigFieldError, match=why):
        identify(replace(facts, **changed))
    if "adapters" not in changed:
        identify(replace(facts, **changed), weights="mine")


def test_the_users_names_are_those_of_other_engines(facts: ModelFacts) -> None:
    named = identify(facts, model="our-llama", weights="2026-11")
    assert named.model_name == "our-llama"
    assert named.revision.startswith("named+")
    # Settings that are off do not count: other engines do not have them.
    assert identify(replace(facts, settings={"kv_cache_dtype": ""}), model="our-llama", weights="2026-11") == named


def test_options_are_checked() -> None:
    assert parse_options({"backend_name": "kvframework", "prefetch_threshold": 1}) == SglangOptions()
    assert parse_options({"kvframework.load_deadline_s": 3}).load_deadline_s == 3
    with pytest.raises(ConfigFieldError, match=r"did you mean kvframework\.endpoint"):
        parse_options({"kvframework.endpiont": "x"})
    with pytest.raises(ConfigFieldError, match=r"extra-config, kvframework\.load_deadline_s"):
        parse_options({"kvframework.load_deadline_s": "soon"})


def test_releases_are_known_by_number_or_interface(caplog: pytest.LogCaptureFixture) -> None:
    assert check_version(KNOWN[0], "any") == ""
    assert not caplog.records
    assert check_version("0.5.99", FINGERPRINT) == "0.5.99"
    assert "is untested with this release, but its storage interface equals that of" in caplog.text
    with pytest.raises(VersionMismatch, match=r"SGLang 0\.6\.0"):
        check_version("0.6.0", "another")


def test_places_of_workers() -> None:
    split = Worker(tp_rank=1, tp_size=4, pp_rank=1, pp_size=2, cp_rank=0, cp_size=2)
    placed = split.place(per_head=True, first_layer=3)
    assert (placed.rank, placed.world_size, placed.stage) == (1, 4, "pp1of2@3+cp0of2")
    placed = split.place(per_head=False)
    assert (placed.rank, placed.world_size, placed.stage) == (0, 1, "pp1of2@0+cp0of2")
    placed = Worker().place(per_head=True)
    assert (placed.rank, placed.world_size, placed.stage) == (0, 1, "")
