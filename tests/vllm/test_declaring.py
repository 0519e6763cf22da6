"""What the connector reads out of vLLM's configuration: options, identity, layer groups, packing, the version."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvf_vllm.canonical import CanonicalBlocks, LayerForm
from kvf_vllm.facts import check_parallel, forms_of, groups_of, packing_of, rank_of
from kvf_vllm.identity import ModelFacts, fingerprint, identify
from kvf_vllm.layouts import GroupFacts
from kvf_vllm.options import VllmOptions, parse_options
from kvf_vllm.supported import check_version
from kvframework.client import named_identity
from kvframework.errors import BadLayout, ConfigFieldError, KVFrameworkError, VersionMismatch

# options


def test_options_are_read_beside_those_of_others() -> None:
    extra = {"kvframework.endpoint": "ipc:///x", "kvframework.lookup_deadline_s": 3, "shared_storage_path": "/y"}
    assert parse_options(extra) == VllmOptions(endpoint="ipc:///x", lookup_deadline_s=3.0)


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigFieldError) as refused:
        parse_options({"kvframework.endpiont": "ipc:///x"})
    assert refused.value.hint == "did you mean kvframework.endpoint?"
    assert "kvframework.lookup_deadline_s" in refused.value.available


@pytest.mark.parametrize(
    ("name", "value"), [("load", "later"), ("lookup_deadline_s", 0), ("endpoint", 5), ("min_hit_tokens", -1)]
)
def test_a_wrong_value_is_refused_at_its_place(name: str, value: object) -> None:
    with pytest.raises(ConfigFieldError) as refused:
        parse_options({f"kvframework.{name}": value})
    assert refused.value.where.endswith(f"kvframework.{name}")


# the version


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1", "0.32.0", "0.32.1.dev4+gabc"])
def test_supported_releases(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.29.0", "0.33.0", "1.0", "dev"])
def test_other_releases_are_refused_with_what_is_supported(version: str) -> None:
    with pytest.raises(VersionMismatch, match="connector interface") as refused:
        check_version(version)
    assert "0.30" in refused.value.available


# identity


def weights(folder: Path, *, value: bytes = b"\x01" * 64, name: str = "model.safetensors") -> Path:
    """A safetensors file of one tensor."""
    folder.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [len(value) // 4], "data_offsets": [0, len(value)]}}).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + value)
    return folder


def facts(**changes: Any) -> ModelFacts:
    given: dict[str, Any] = {
        "name": "org/model", "revision": "r", "quantization": "", "load_format": "auto", "seed": 0,
        "config": {"hidden_size": 8, "_name_or_path": "anywhere"}, "dtype": "torch.float32", "settings": {},
        "directory": None,
    }  # fmt: skip
    return ModelFacts(**{**given, **changes})


def test_whatever_changes_kv_changes_the_identity(tmp_path: Path) -> None:
    first, other = weights(tmp_path / "a"), weights(tmp_path / "b", value=b"\x01" * 60 + b"\x02" * 4)
    variants = [
        identify(facts(directory=first)),
        identify(facts(directory=other)),
        identify(facts(directory=first, revision="s")),
        identify(facts(directory=first, quantization="fp8")),
        identify(facts(directory=first, config={"hidden_size": 9})),
        identify(facts(directory=first, dtype="torch.bfloat16")),
        identify(facts(directory=first, settings={"disable_sliding_window": True})),
        identify(facts(directory=first), model="org/model", weights="w1"),
        identify(facts(directory=first, name="org/other")),
        identify(facts(directory=first), model="called otherwise"),
        identify(facts(directory=None), weights="w1"),
        identify(facts(directory=None), weights="w2"),
        identify(facts(load_format="dummy", seed=1)),
        identify(facts(load_format="dummy", seed=2)),
    ]
    assert len(set(variants)) == len(variants)


def test_where_a_model_lies_does_not_change_the_identity(tmp_path: Path) -> None:
    here, there = weights(tmp_path / "a"), weights(tmp_path / "b")
    moved = facts(directory=there, config={"hidden_size": 8, "_name_or_path": "elsewhere"})
    assert identify(facts(directory=here)) == identify(moved)


def test_with_both_names_the_kv_is_called_as_any_engine_calls_it(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "_name_or_path": "anywhere"}
    names = {"model": "our-llama", "weights": "2026-11"}
    found = identify(facts(directory=weights(tmp_path / "a")), **names)
    assert found == named_identity("our-llama", "2026-11", config=config, dtype="float32")
    assert found == identify(facts(revision="other", name="elsewhere"), **names)
    others = [
        identify(facts(dtype="torch.bfloat16"), **names),
        identify(facts(quantization="fp8"), **names),
        identify(facts(config={**config, "hidden_size": 9}), **names),
        identify(facts(settings={"disable_sliding_window": True}), **names),
        identify(facts(), model="our-llama", weights="2026-12"),
    ]
    assert len({found, *others}) == 6
    assert identify(facts(settings={"disable_sliding_window": False, "code_revision": ""}), **names) == found


def test_weights_without_a_name_are_refused(tmp_path: Path) -> None:
    for directory in (None, tmp_path):
        with pytest.raises(ConfigFieldError) as refused:
            identify(facts(directory=directory))
        assert "kvframework.weights" in refused.value.hint


def test_every_tensor_and_every_file_counts(tmp_path: Path) -> None:
    found = {fingerprint(weights(tmp_path / "a"))}
    for index in range(16):
        value = bytearray(64)
        value[index * 4] = 1
        found.add(fingerprint(weights(tmp_path / "a", value=bytes(value))))
    weights(tmp_path / "a", name="more.safetensors")
    found.add(fingerprint(tmp_path / "a"))
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(b"x" * 100)
    found.add(fingerprint(tmp_path / "a"))
    (tmp_path / "a" / "broken.safetensors").write_bytes(b"\xff" * 20)
    found.add(fingerprint(tmp_path / "a"))
    assert len(found) == 20


# layer groups


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
    config = caches(spec("FullAttentionSpec"), spec("SlidingWindowSpec", sliding_window=512, block_size=64))
    assert groups_of(config) == (
        GroupFacts(("layers.0.attn",), 128),
        # vLLM counts the position itself.
        GroupFacts(("layers.1.attn",), 64, 511),
    )


def test_full_attention_that_only_computes_a_window_keeps_all_blocks() -> None:
    assert groups_of(caches(spec("FullAttentionSpec", sliding_window=512)))[0].window == 0


@pytest.mark.parametrize("kind", ["MambaSpec", "ChunkedLocalAttentionSpec", "CrossAttentionSpec", "RSWASpec"])
def test_caches_that_cannot_be_kept_are_refused_by_name(kind: str) -> None:
    with pytest.raises(BadLayout, match=kind):
        groups_of(caches(spec("FullAttentionSpec"), spec(kind)))


def test_groups_that_vllm_does_not_transfer_are_refused() -> None:
    config = caches(spec("FullAttentionSpec"))
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
    silent = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    with pytest.raises(BadLayout, match=r"layers\.0\.attn"):
        packing_of(silent, config, {})


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


def test_layer_forms_name_the_layer_without_a_backend() -> None:
    config = caches(spec("FullAttentionSpec"))
    silent = engine(config)
    silent.compilation_config.static_forward_context = {}
    with pytest.raises(BadLayout, match=r"layers\.0\.attn"):
        forms_of(silent, config)


# splitting a model


def test_ranks_with_the_same_kv_are_one_and_its_first_stores() -> None:
    found = [rank_of(SimpleNamespace(rank=rank, world_size=4), SimpleNamespace(kv_tp_replicas=2)) for rank in range(4)]
    assert found == [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]
    assert rank_of(SimpleNamespace(rank=3, world_size=4), SimpleNamespace(kv_tp_replicas=1)) == (3, 4, True)


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_splits_that_cannot_be_served_are_refused(name: str) -> None:
    check_parallel(SimpleNamespace(tensor_parallel_size=4))
    with pytest.raises(KVFrameworkError, match=name):
        check_parallel(SimpleNamespace(**{name: 2}))
