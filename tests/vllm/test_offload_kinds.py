"""Each kind of cache that vLLM has is decided about: a new one fails here, and is refused at an engine's start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvframework.errors import BadLayout

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

# What others are made of, and the one that stands for several layers.
BASES = {"AttentionSpec", "UniformTypeKVCacheSpecs"}


def groups_of(*names: str, **fields: Any) -> Any:
    specs = [type(name, (), {"block_size": 16, **fields})() for name in names]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["0"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def test_every_kind_of_vllms_is_in_the_table() -> None:
    from vllm.v1 import kv_cache_interface as vllms

    from kvf_vllm.offloading.kinds import KINDS

    def below(kind: type) -> set[str]:
        return {name for each in kind.__subclasses__() for name in (each.__name__, *below(each))}

    there = {name for name in below(vllms.KVCacheSpec) if hasattr(vllms, name)}
    assert there - BASES == set(KINDS)


def test_the_table_is_in_the_docs() -> None:
    from kvf_vllm.offloading.kinds import table

    doc = Path(__file__).resolve().parents[2] / "docs" / "engines" / "vllm.md"
    assert table() in doc.read_text()


@pytest.mark.parametrize("name", ["CrossAttentionSpec", "HiSparseHotSpec", "SpecOfNextYear"])
def test_a_kind_that_is_not_kept_is_refused(name: str) -> None:
    from kvf_vllm.offloading.kinds import check_kinds

    with pytest.raises(BadLayout, match=f"group 1 holds {name}") as refused:
        check_kinds(groups_of("FullAttentionSpec", name))
    assert "without the connector" in str(refused.value)


def test_of_a_reference_window_only_prompts_are_stored() -> None:
    from kvf_vllm.offloading.kinds import check_kinds

    assert not check_kinds(groups_of("MLAAttentionSpec", "SlidingWindowMLASpec", "CircularBufferSpec"))
    assert check_kinds(groups_of("RSWASpec"))


def test_states_of_which_vllm_keeps_none_are_refused() -> None:
    from kvf_vllm.offloading.kinds import check_kinds

    with pytest.raises(BadLayout, match="recurrent states"):
        check_kinds(groups_of("MambaSpec", mamba_type="MAMBA2", mamba_cache_mode="none"))
