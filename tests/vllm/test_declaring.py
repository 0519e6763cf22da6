"""What the connector reads out of vLLM's configuration: options, identity, layer groups, packing, the version."""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvf_vllm.canonical import CanonicalBlocks, LayerForm
from kvf_vllm.facts import check_parallel, check_sleep, forms_of, groups_of, model_of, packing_of, part_of, place_of
from kvf_vllm.identity import identify
from kvf_vllm.layouts import GroupFacts, OpaqueBlocks, packing_name
from kvf_vllm.options import VllmOptions, check_offloading, check_version, parse_options
from kvframework.client import ModelFacts, ModelPart, model_files
from kvframework.errors import BadLayout, ConfigFieldError, KVFrameworkError, VersionMismatch


@pytest.fixture(autouse=True)
def _own_memory_of_digests(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_options_are_read_beside_those_of_others() -> None:
    extra = {"kvframework.endpoint": "ipc:///x", "kvframework.lookup_deadline_s": 3, "shared_storage_path": "/y"}
    assert parse_options(extra) == VllmOptions(endpoint="ipc:///x", lookup_deadline_s=3.0)


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigFieldError) as refused:
        parse_options({"kvframework.endpiont": "ipc:///x"})
    assert refused.value.hint == "did you mean kvframework.endpoint?"
    assert "kvframework.lookup_deadline_s" in refused.value.available


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load", "later"),
        ("lookup_deadline_s", 0),
        ("deadline_scale", 0.05),
        ("deadline_scale", 101),
        ("announce_salts", "yes"),
        ("endpoint", 5),
        ("min_hit_tokens", -1),
    ],
)
def test_a_wrong_value_is_refused_at_its_place(name: str, value: object) -> None:
    with pytest.raises(ConfigFieldError) as refused:
        parse_options({f"kvframework.{name}": value})
    assert refused.value.where.endswith(f"kvframework.{name}")


@pytest.mark.parametrize(
    ("version", "tried"), [("0.30.0", ""), ("0.31.1", ""), ("0.32.1.dev4+gabc", ""), ("0.33.1", "0.33")]
)
def test_releases_that_are_served_and_one_that_is_tried_with_blocks_of_its_own(version: str, tried: str) -> None:
    assert check_version(version) == tried
    supported = packing_name("FLASH_ATTN", "", "float16", 16, {})
    assert (packing_name("FLASH_ATTN", "", "float16", 16, {}, release=tried) == supported) == (tried == "")


@pytest.mark.parametrize("version", ["0.29.0", "0.34.0", "0.3", "1.0", "dev"])
def test_other_releases_are_refused_with_what_is_supported(version: str) -> None:
    with pytest.raises(VersionMismatch, match="connector interface") as refused:
        check_version(version)
    assert "0.30" in refused.value.available


@pytest.mark.parametrize("version", ["0.30.1", "0.31.0"])
def test_a_release_whose_offloading_is_another_is_refused(version: str) -> None:
    for known in ("0.32.0", "0.33.0"):
        check_offloading(known, on_cpu=False)
        check_offloading(version, on_cpu=True)
    with pytest.raises(VersionMismatch, match="does not support device offloading"):
        check_offloading(version, on_cpu=False)


def weights(folder: Path, *, value: bytes = b"\x01" * 64, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [len(value) // 4], "data_offsets": [0, len(value)]}}).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + value)
    return folder


def facts(**changes: Any) -> ModelFacts:
    given: dict[str, Any] = {
        "name": "org/model",
        "revision": "r",
        "quantization": "",
        "load_format": "auto",
        "seed": 0,
        "config": {"hidden_size": 8, "_name_or_path": "anywhere"},
        "dtype": "torch.float32",
        "settings": {},
        "files": (),
    }
    return ModelFacts(**{**given, **changes})


def test_weights_that_vllm_loads_from_elsewhere_have_no_name_but_the_users(tmp_path: Path) -> None:
    """All else that names are made of is of `kvframework.client`, see tests/sglang/test_naming.py."""
    files = model_files(str(weights(tmp_path / "a")), code=False)
    assert identify(facts(files=files)) != identify(facts(files=files, revision="s"))
    for unnamed in (facts(), facts(files=files, load_format="tensorizer")):
        with pytest.raises(ConfigFieldError) as refused:
            identify(unnamed)
        assert "kvframework.weights" in refused.value.hint
        assert identify(unnamed, weights="w").revision.endswith("+w")


def test_the_start_of_an_engine_is_that_of_its_process(tmp_path: Path) -> None:
    started = model_of(vllm_config(weights(tmp_path / "a"))).started
    assert time.time() - 3600 < started < time.time()


def vllm_config(model: Path | str, **changes: Any) -> Any:
    config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8}, rope_parameters=changes.pop("rope_parameters", None))
    given: dict[str, Any] = {
        "model": str(model),
        "revision": None,
        "quantization": None,
        "seed": 0,
        "hf_config": config,
        "dtype": "float32",
        "code_revision": None,
        "max_model_len": 8192,
    }
    load = SimpleNamespace(load_format="auto", download_dir=None)
    return SimpleNamespace(instance_id="one", model_config=SimpleNamespace(**{**given, **changes}), load_config=load)


def test_settings_of_the_engine_that_change_kv_are_in_the_identity(tmp_path: Path) -> None:
    folder = weights(tmp_path / "a")
    long_rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    variants = [
        identify(model_of(vllm_config(folder))),
        # Long factors for every prompt, because there may be a long one.
        identify(model_of(vllm_config(folder, rope_parameters=long_rope))),
        identify(model_of(vllm_config(folder, rope_parameters={"full_attention": long_rope}, quantization="fp8"))),
        identify(model_of(vllm_config(folder, quantization_config={"bits": 4}))),
        identify(model_of(vllm_config(folder, multimodal_config=SimpleNamespace(mm_processor_kwargs={"crops": 4})))),
    ]
    assert len(set(variants)) == len(variants)
    assert identify(model_of(vllm_config(folder, rope_parameters=long_rope, max_model_len=4096))) == variants[0]
    assert identify(model_of(vllm_config(folder, rope_parameters={"rope_type": "default"}))) == variants[0]


def test_a_draft_model_keeps_kv_beside_that_of_the_model(tmp_path: Path) -> None:
    def with_draft(folder: Path) -> Any:
        config = vllm_config(tmp_path / "a")
        draft = vllm_config(folder).model_config
        return model_of(SimpleNamespace(**vars(config), speculative_config=SimpleNamespace(draft_model_config=draft)))

    weights(tmp_path / "a")
    one, other = weights(tmp_path / "b"), weights(tmp_path / "c", value=b"\x02" * 64)
    plain = vllm_config(tmp_path / "a")
    plain.speculative_config = SimpleNamespace(draft_model_config=plain.model_config)
    variants = {identify(with_draft(one)), identify(with_draft(other)), identify(model_of(plain))}
    assert len(variants) == 3
    assert identify(model_of(vllm_config(tmp_path / "a"))) in variants


def spec(kind: str, **fields: Any) -> Any:
    given: dict[str, Any] = {"block_size": 128, "num_kv_heads": 4, "head_size": 64, "dtype": "torch.float32"}
    return type(kind, (), {**given, **fields})()


def caches(*specs: Any, **fields: Any) -> Any:
    groups = [
        SimpleNamespace(layer_names=[f"layers.{index}.attn"], kv_cache_spec=each, enable_kv_transfer=True)
        for index, each in enumerate(specs)
    ]
    given = {"kv_cache_groups": groups, "kv_cache_layout": "LBHNC", "num_blocks": 16, **fields}
    return SimpleNamespace(**given)


def test_groups_are_those_of_vllm() -> None:
    full = spec("FullAttentionSpec", sliding_window=512)
    assert groups_of(caches(full, spec("SlidingWindowSpec", sliding_window=512, block_size=64))) == (
        # It computes a window and keeps all blocks.
        GroupFacts(("layers.0.attn",), 128),
        # vLLM counts the position itself.
        GroupFacts(("layers.1.attn",), 64, 511),
    )


@pytest.mark.parametrize("kind", ["CircularBufferSpec", "ChunkedLocalAttentionSpec", "CrossAttentionSpec", "RSWASpec"])
def test_caches_that_cannot_be_kept_are_refused_by_name(kind: str) -> None:
    with pytest.raises(BadLayout, match=kind):
        groups_of(caches(spec("FullAttentionSpec"), spec(kind)))


def state(**fields: Any) -> Any:
    """vLLM's description of a recurrent layer's cache, which has no `dtype`."""
    given: dict[str, Any] = {
        "block_size": 640,
        "mamba_type": SimpleNamespace(name="GDN_ATTN"),
        "mamba_cache_mode": "align",
        "shapes": ((3, 1024), (4, 128, 128)),
        "dtypes": ("torch.bfloat16", "torch.float32"),
        "page_size_bytes": 327680,
    }
    return type("MambaSpec", (), {**given, **fields})()


def test_recurrent_states_are_a_group_of_their_own() -> None:
    full, recurrent = groups_of(caches(spec("FullAttentionSpec", block_size=640), state()))
    assert (full.state, recurrent) == (False, GroupFacts(("layers.1.attn",), 640, state=True))
    form = OpaqueBlocks("p")
    assert form.options((full, recurrent))["chunk_tokens"] == 640
    assert [each["state"] for each in form.options((full, recurrent))["groups"]] == [False, True]  # type: ignore[attr-defined]
    assert form.options((full,))["chunk_tokens"] == 0, "without states the server decides"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mamba_type": SimpleNamespace(name="CUSTOM")}, "recurrent states of the kind CUSTOM"),
        ({"mamba_type": "HYENA"}, "recurrent states of the kind HYENA"),
        ({"mamba_cache_mode": "none"}, "vLLM keeps none"),
        ({"mamba_cache_mode": "all"}, "vLLM keeps none"),
    ],
)
def test_states_that_cannot_be_kept_are_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadLayout, match=reason):
        groups_of(caches(spec("FullAttentionSpec"), state(**fields)))


def test_the_packing_names_all_that_a_state_depends_on() -> None:
    """A model whose states have another size, shape or dtype with another backend shares nothing."""
    variants = []
    for changes in (
        {},
        {"shapes": ((1024, 3), (4, 128, 128))},
        {"dtypes": ("torch.bfloat16", "torch.bfloat16")},
        {"page_size_bytes": 655360},
        {"mamba_type": SimpleNamespace(name="MAMBA2")},
    ):
        config = caches(spec("FullAttentionSpec"), state(**changes))
        variants.append(packing_of(engine(config), config, {}))
    config = caches(spec("FullAttentionSpec"), state())
    variants.append(packing_of(engine(config, backend="GDN_OTHER"), config, {}))
    assert len(set(variants)) == len(variants)
    assert all(len(variant) <= 128 for variant in variants)


def test_states_of_another_release_have_another_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turned state has the same shape."""
    config, plain = caches(state()), caches(spec("FullAttentionSpec"))
    names = []
    for release in ("0.31.0", "0.32.0"):
        package = ModuleType("an_engine")
        package.__version__ = release  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "an_engine", package)
        backend = SimpleNamespace(get_name=lambda: "B")
        said = {"attn_backend": backend, "isa": "", "kv_cache_dtype": "auto"}
        layer = type("Layer", (), {"__module__": "an_engine.layers", **said})()
        told = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layers.0.attn": layer}))
        names.append([packing_of(told, each, {}) for each in (config, plain)])
    assert names[0][0] != names[1][0]
    assert names[0][1] == names[1][1], "blocks of attention are shared between releases"


def test_a_recurrent_layer_names_its_backend_by_a_method() -> None:
    config = caches(state())
    backend = SimpleNamespace(get_name=lambda: "GDN_ATTN")
    recurrent = SimpleNamespace(get_attn_backend=lambda: backend)
    told = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layers.0.attn": recurrent}))
    assert packing_of(told, config, {}).startswith("vllm1/GDN_ATTN/bfloat16+float32/b640/")


def test_states_do_not_convert_to_canonical() -> None:
    config = caches(spec("FullAttentionSpec"), state())
    with pytest.raises(BadLayout, match=r"MambaSpec.*does not hold keys and values"):
        CanonicalBlocks(forms_of(engine(config, backend="FLASH_ATTN", isa=""), config))


def test_groups_that_vllm_does_not_transfer_are_refused() -> None:
    for each in (spec("FullAttentionSpec"), state()):
        config = caches(each)
        config.kv_cache_groups[0].enable_kv_transfer = False
        with pytest.raises(BadLayout):
            groups_of(config)


def engine(config: Any, *, isa: str = "vec", backend: str = "CPU_ATTN", kv_dtype: str = "auto") -> Any:
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend), isa=isa, kv_cache_dtype=kv_dtype)
    names = [name for group in config.kv_cache_groups for name in group.layer_names]
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, layer)),
        model_config=SimpleNamespace(dtype="torch.float32"),
    )


def test_the_packing_names_all_that_a_block_depends_on() -> None:
    full = caches(spec("FullAttentionSpec"))
    variants = [
        packing_of(engine(full), full, {}),
        packing_of(engine(full, isa="amx"), full, {}),
        packing_of(engine(full, backend="FLASH_ATTN"), full, {}),
        packing_of(engine(full, kv_dtype="fp8"), full, {}),
        packing_of(engine(full), full, {"layers.0.attn": 32}),
    ]
    for changed in (
        caches(spec("FullAttentionSpec", block_size=64)),
        caches(spec("FullAttentionSpec", head_size=128)),
        caches(spec("FullAttentionSpec", num_kv_heads=8)),
        caches(spec("FullAttentionSpec", dtype="torch.bfloat16")),
        caches(spec("FullAttentionSpec"), spec("FullAttentionSpec")),
        caches(spec("FullAttentionSpec"), kv_cache_layout="LBNHC"),
    ):
        variants.append(packing_of(engine(changed), changed, {}))
    assert len(set(variants)) == len(variants)
    assert variants[0].startswith("vllm1/CPU_ATTN/vec/float32/b128/")
    assert all(len(variant) <= 128 for variant in variants)


def test_layer_names_do_not_change_the_packing() -> None:
    one, other = caches(spec("FullAttentionSpec")), caches(spec("FullAttentionSpec"))
    other.kv_cache_groups[0].layer_names = ["decoder.0.attn"]
    assert packing_of(engine(one), one, {}) == packing_of(engine(other), other, {})


def test_a_layer_that_names_no_backend_is_refused() -> None:
    config = caches(spec("FullAttentionSpec"))
    silent = engine(config)
    silent.compilation_config.static_forward_context = {}
    with pytest.raises(BadLayout, match=r"layers\.0\.attn"):
        packing_of(silent, config, {})
    with pytest.raises(BadLayout, match=r"layers\.0\.attn"):
        forms_of(silent, config)


def test_what_vllm_says_of_a_layer_decides_whether_it_converts_exactly() -> None:
    config = caches(spec("FullAttentionSpec", kv_quant_mode=0, tokens_per_state=1, state_content_bytes=None))
    (form,) = forms_of(engine(config, backend="FLASH_ATTN", isa=""), config).values()
    assert form == LayerForm(
        "FLASH_ATTN", "", "LBHNC", "FullAttentionSpec", "float32", "float32", "auto", 4, 64, 64, 128
    )
    CanonicalBlocks({"layers.0.attn": form})
    for changed in ({"kv_quant_mode": 1}, {"state_content_bytes": 99}, {"num_head_slots": 8}, {"tokens_per_state": 4}):
        config = caches(spec("FullAttentionSpec", **changed))
        with pytest.raises(BadLayout):
            CanonicalBlocks(forms_of(engine(config, backend="FLASH_ATTN", isa=""), config))


def parallel(rank: int, **fields: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, **{"world_size": 4, "pipeline_parallel_size": 1, **fields})


def test_ranks_with_the_same_kv_are_one_and_its_first_stores() -> None:
    found = [place_of(parallel(rank), SimpleNamespace(kv_tp_replicas=2)) for rank in range(4)]
    assert found == [(0, 2, True, 0), (0, 2, False, 0), (1, 2, True, 0), (1, 2, False, 0)]
    assert place_of(parallel(3), SimpleNamespace(kv_tp_replicas=1)) == (3, 4, True, 0)


def test_ranks_count_within_their_pipeline_stage_whose_name_holds_its_layers() -> None:
    split = [parallel(rank, pipeline_parallel_size=2) for rank in range(4)]
    found = [place_of(each, SimpleNamespace(kv_tp_replicas=1)) for each in split]
    assert found == [(0, 2, True, 0), (1, 2, True, 0), (0, 2, True, 1), (1, 2, True, 1)]
    stages = [(GroupFacts((f"layers.{index}",), 16),) for index in range(2)]
    names = {part_of(model(2), split[0], found[0], groups).stage for groups in stages}
    names |= {part_of(model(2), parallel(0, pipeline_parallel_size=4), found[0], stages[0]).stage}
    assert len({"", *names}) == 4
    assert part_of(model(1), parallel(0), found[0], stages[0]) == ModelPart(8, 0, 2)


def model(layers: int) -> SimpleNamespace:
    return SimpleNamespace(get_total_num_kv_heads=lambda: 8, get_total_num_hidden_layers=lambda: layers)


@pytest.mark.parametrize(
    ("layers", "names", "known"),
    [
        (4, ["l.2", "l.3"], True),
        (5, ["l.2", "l.3"], False),
        (4, ["l.0", "l.1"], False),
        (4, ["l.3", "l.2"], False),
        (4, ["a.2.b.2", "a.3.b.3"], False),
        (4, ["x", "y"], False),
    ],
    ids=["even", "uneven", "others", "turned", "two_numbers", "none"],
)
def test_layers_of_a_stage_are_told_only_if_their_numbers_are_certain(
    layers: int, names: list[str], known: bool
) -> None:
    place = place_of(parallel(3, pipeline_parallel_size=2), None)
    part = part_of(model(layers), parallel(3, pipeline_parallel_size=2), place, (GroupFacts(tuple(names), 16),))
    assert part.stage.startswith("+pp2-")
    assert (part.first_layer, part.layers) == ((2, 4) if known else (0, 0))
    several = (GroupFacts(tuple(names), 16), GroupFacts((), 16))
    assert part_of(model(layers), parallel(3, pipeline_parallel_size=2), place, several).layers == 0


@pytest.mark.parametrize("name", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_splits_that_cannot_be_served_are_refused(name: str) -> None:
    check_parallel(SimpleNamespace(tensor_parallel_size=4, pipeline_parallel_size=2))
    with pytest.raises(KVFrameworkError, match=name):
        check_parallel(SimpleNamespace(**{name: 2}))


@pytest.mark.engine_feature("vLLM", "sleep and wake", "refused, stand-ins")
def test_an_engine_that_sleeps_unheard_keeps_its_memory_to_itself() -> None:
    sleeps = SimpleNamespace(enable_sleep_mode=True)
    for transport in ("auto", "cuda_ipc"):
        with pytest.raises(ConfigFieldError, match="does not tell its connector when"):
            check_sleep(sleeps, tells=False, transport=transport)
        check_sleep(sleeps, tells=True, transport=transport)
        check_sleep(SimpleNamespace(enable_sleep_mode=False), tells=False, transport=transport)
    check_sleep(sleeps, tells=False, transport="cpu_gather")
