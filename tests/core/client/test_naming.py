"""What KV is called by the user's own names: equal for equal promises and facts, else never."""

from __future__ import annotations

from typing import Any

import pytest

from kvframework.client import named_identity
from kvframework.errors import RequestError

CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "text_config": {"layer_types": ["full_attention"] * 2},
}


def named(**changes: Any) -> Any:
    given: dict[str, Any] = {"config": CONFIG, "dtype": "float32"}
    return named_identity(changes.pop("model", "m"), changes.pop("weights", "w"), **{**given, **changes})


def test_the_dtype_is_told_beside_the_name() -> None:
    assert named(dtype="torch.bfloat16").dtype == named(dtype="bfloat16").dtype == "bfloat16"
    assert named(dtype="torch.bfloat16") == named(dtype="bfloat16")


def test_whatever_may_change_kv_changes_the_name() -> None:
    variants = [
        named(),
        named(model="n"),
        named(weights="v"),
        named(dtype="bfloat16"),
        named(quantization="awq"),
        named(settings={"code_revision": "abc"}),
        named(config={**CONFIG, "hidden_size": 9}),
        named(config={**CONFIG, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}}),
        named(config={**CONFIG, "text_config": {"layer_types": ["sliding_attention", "full_attention"]}}),
        named(config={**CONFIG, "new_field_of_a_new_model": 2}),
        # Names run into each other nowhere.
        named(model="mw", weights="w"),
        named(model="m", weights="ww"),
    ]
    assert len(set(variants)) == len(variants)


def test_what_two_engines_say_differently_of_the_same_kv_does_not_count() -> None:
    same = [
        named(dtype="torch.float32"),
        named(settings={"code_revision": "", "disable_sliding_window": False}),
        named(config={**CONFIG, "_name_or_path": "/somewhere", "transformers_version": "5", "dtype": "bfloat16"}),
        named(config={**CONFIG, "text_config": {"layer_types": ("full_attention",) * 2, "torch_dtype": "float16"}}),
        named(config=dict(reversed(CONFIG.items()))),
    ]
    assert {*same} == {named()}


@pytest.mark.parametrize("missing", ["model", "weights"])
def test_both_names_are_needed(missing: str) -> None:
    with pytest.raises(RequestError, match="weights"):
        named(**{missing: ""})
