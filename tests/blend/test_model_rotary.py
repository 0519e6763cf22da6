"""A model's rotary parameters, learnt from it and proven on it; models that cannot be moved are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvf_blend.errors import BadRotary
from kvf_blend.rotary import Rotary, check
from tests.support.lazy import torch, transformers
from tests.transformers.hybrid_models import made

pytestmark = pytest.mark.transformers

ENDS: dict[str, Any] = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2}
SMALL: dict[str, Any] = {
    **ENDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": None,
}
GPTJ_SMALL: dict[str, Any] = {**ENDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048, "rotary_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    **EXPERTS,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def whole(style: str = "half", theta: float = 10000.0, **more: Any) -> Rotary:
    return Rotary(style, theta, head_dim=16, rotary_dim=16, **more)


def part(dim: int, style: str = "half", theta: float = 10000.0) -> Rotary:
    return Rotary(style, theta, head_dim=16, rotary_dim=dim)


def latent(t: Any, style: str, **more: Any) -> Rotary:
    """transformers keeps the latent of MLA as the keys of its cache, what is rotated as the values; and kept whole keys
    of every head in earlier releases."""
    if not hasattr(t.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention, "expand_kv"):
        return Rotary(style, 10000.0, head_dim=24, rotary_dim=8, offset=16, **more)
    return Rotary(style, 10000.0, head_dim=8, rotary_dim=8, plane="values", **more)


SAID_YARN: dict[str, Any] = {
    "scaling": "yarn",
    "factor": 8.0,
    "original_max_position": 1024,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
}

# The model's configuration and what is said of it, made by the module `transformers`: no collection imports it.
FAMILIES: dict[str, Callable[[Any], tuple[Any, Rotary]]] = {
    "llama": lambda t: (t.LlamaConfig(**SMALL), whole()),
    "llama, linear": lambda t: (t.LlamaConfig(**SMALL, rope_parameters=LINEAR), whole(scaling="linear", factor=4.0)),
    "llama, llama3": lambda t: (
        t.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
        whole(
            theta=500000.0,
            scaling="llama3",
            factor=8.0,
            original_max_position=1024,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    ),
    "llama, yarn": lambda t: (t.LlamaConfig(**SMALL, rope_parameters=YARN), whole(**SAID_YARN)),
    "llama, yarn by its lengths": lambda t: (
        t.LlamaConfig(**SMALL, rope_parameters={**YARN, "factor": None}),
        whole(**SAID_YARN),
    ),
    "llama, yarn by nothing": lambda t: (t.LlamaConfig(**SMALL, rope_parameters={**YARN, "factor": 1.0}), whole()),
    "mistral": lambda t: (t.MistralConfig(**SMALL), whole()),
    "mixtral": lambda t: (t.MixtralConfig(**SMALL, num_local_experts=4, **EXPERTS), whole(theta=1000000.0)),
    "qwen2": lambda t: (t.Qwen2Config(**SMALL), whole()),
    "qwen3": lambda t: (t.Qwen3Config(**SMALL, head_dim=16), whole()),
    "qwen3 moe": lambda t: (
        t.Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, moe_intermediate_size=32, **EXPERTS),
        whole(),
    ),
    "gemma": lambda t: (t.GemmaConfig(**SMALL, head_dim=16), whole()),
    "gemma2": lambda t: (t.Gemma2Config(**SMALL, head_dim=16), whole()),
    "olmo2": lambda t: (t.Olmo2Config(**SMALL), whole()),
    "phi3": lambda t: (t.Phi3Config(**SMALL), whole()),
    "falcon": lambda t: (t.FalconConfig(**SMALL), whole()),
    "gpt_oss, yarn": lambda t: (
        t.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, **EXPERTS),
        whole(
            theta=150000.0,
            scaling="yarn",
            factor=32.0,
            original_max_position=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
        ),
    ),
    "gpt_neox, a part": lambda t: (t.GPTNeoXConfig(**SMALL), part(4)),
    "phi, a part": lambda t: (t.PhiConfig(**SMALL), part(8)),
    "stablelm, a part": lambda t: (t.StableLmConfig(**SMALL), part(4)),
    "gptj, a part": lambda t: (t.GPTJConfig(**GPTJ_SMALL), part(8, "interleaved")),
    "codegen, a part": lambda t: (t.CodeGenConfig(**GPTJ_SMALL), part(8, "interleaved")),
    "glm, a part": lambda t: (t.GlmConfig(**SMALL, head_dim=16), part(8, "interleaved")),
    "glm4, a part": lambda t: (t.Glm4Config(**SMALL, head_dim=16), part(8, "interleaved")),
    "cohere": lambda t: (t.CohereConfig(**SMALL), whole("interleaved", theta=500000.0)),
    "cohere2": lambda t: (t.Cohere2Config(**SMALL), whole("interleaved")),
    "deepseek_v2": lambda t: (t.DeepseekV2Config(**MLA), latent(t, "interleaved")),
    "deepseek_v2, yarn": lambda t: (
        t.DeepseekV2Config(**MLA, rope_parameters=YARN),
        latent(t, "interleaved", **SAID_YARN),
    ),
    "deepseek_v3": lambda t: (t.DeepseekV3Config(**MLA), latent(t, "half")),
    "deepseek_v3, yarn": lambda t: (t.DeepseekV3Config(**MLA, rope_parameters=YARN), latent(t, "half", **SAID_YARN)),
}


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global probe, rotary_of, rotate_keys
    from kvf_blend.engine.model_rotary import probe, rotary_of
    from kvf_blend.engine.placing import rotate_keys


TOKENS = 11


def kv_at(model, position):
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(
            input_ids=(torch.arange(TOKENS) * 29 % 89)[None],
            past_key_values=cache,
            position_ids=torch.arange(position, position + TOKENS)[None],
        )
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_said_of_a_model_moves_its_kv(family):
    config, expected = FAMILIES[family](transformers)
    model = made(config)

    rotary = rotary_of(model)

    assert rotary == expected
    check(rotary)
    turned = rotary.plane == "values"
    for here, there in ((0, 1500), (1500, 7)):
        before, after = kv_at(model, here), kv_at(model, there)
        for layer, (old, new) in enumerate(zip(before, after, strict=True)):
            assert torch.equal(old[not turned], new[not turned]) or layer > 0
            moved = rotate_keys(old[turned], rotary, there - here)
            assert not torch.allclose(old[turned], new[turned], atol=0.1)
            # Layer 0 to the rounding of angles near position 1500; below, its noise has passed through the model.
            torch.testing.assert_close(
                moved, new[turned], rtol=0, atol=(2e-3 if layer else 2e-4) * new[turned].abs().max()
            )
            assert torch.equal(moved[..., : rotary.offset], old[turned][..., : rotary.offset])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama, llama3", "gpt_neox, a part", "cohere", "deepseek_v3, yarn"])
def test_other_dtypes_prove_it_too(family, dtype):
    config, expected = FAMILIES[family](transformers)
    assert rotary_of(made(config, dtype=dtype)) == expected


def test_a_deep_model_in_half_precision_is_proven():
    deep = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 32}, rope_parameters=LLAMA3)
    assert rotary_of(made(deep, dtype="bfloat16")).scaling == "llama3"


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("llama, llama3", {"theta": 500500.0}),
        ("llama, llama3", {"factor": 8.1}),
        ("llama, llama3", {"low_freq_factor": 1.1}),
        ("llama, llama3", {"high_freq_factor": 4.1}),
        ("llama, llama3", {"original_max_position": 1050}),
        ("llama, llama3", {"style": "interleaved"}),
        ("llama, yarn", {"beta_fast": 32.0}),
        ("llama, yarn", {"beta_slow": 2.0}),
        ("llama, yarn", {"truncate": False}),
        ("llama, linear", {"factor": 4.01}),
        ("gpt_neox, a part", {"rotary_dim": 6}),
        ("gpt_neox, a part", {"offset": 12}),
        ("cohere", {"style": "half"}),
        ("deepseek_v3", {"style": "interleaved"}),
    ],
    ids=str,
)
def test_the_proof_sees_a_parameter_that_is_a_little_wrong(family, wrong):
    config, right = FAMILIES[family](transformers)
    asked = probe(made(config))
    assert asked.first_difference(right) == (config.num_hidden_layers, "")
    layer, difference = asked.first_difference(msgspec.structs.replace(right, **wrong))
    assert layer == 0
    assert difference


REFUSED = {
    "learned positions": lambda t: (t.GPT2Config(**ENDS, n_embd=64, n_layer=2, n_head=4), "does not describe rotary"),
    "alibi": lambda t: (t.BloomConfig(**ENDS, hidden_size=64, n_layer=2, n_head=4), "does not describe rotary"),
    "alibi beside a rotary configuration": lambda t: (t.FalconConfig(**SMALL, alibi=True), "layer 0 .* do not turn"),
    "no attention": lambda t: (t.MambaConfig(**ENDS, hidden_size=32, num_hidden_layers=2), "does not describe rotary"),
    "attention in some layers": lambda t: (
        t.Qwen3NextConfig(**SMALL, head_dim=16, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2),
        "cannot compute keys",
    ),
    "layers without positions": lambda t: (
        t.SmolLM3Config(**{**SMALL, "num_hidden_layers": 4}),
        "layer 3 .* do not turn",
    ),
    "other positions in other layers": lambda t: (
        t.Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 6}, head_dim=16),
        "differ",
    ),
    "dynamic": lambda t: (t.LlamaConfig(**SMALL, rope_parameters={**YARN, "rope_type": "dynamic"}), "kind 'dynamic'"),
    "longrope": lambda t: (
        t.LlamaConfig(
            **SMALL,
            rope_parameters={**YARN, "rope_type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8},
        ),
        "kind 'longrope'",
    ),
    "several axes": lambda t: (
        t.Qwen2Config(**SMALL, rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}),
        "kind 'mrope'",
    ),
    "a part that is no pair": lambda t: (t.GPTNeoXConfig(**SMALL, rotary_pct=0.44), "rotary_dim is 7"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_moved_is_refused(kind):
    config, why = REFUSED[kind](transformers)
    with pytest.raises(BadRotary, match=why) as refused:
        rotary_of(made(config))
    assert refused.value.available
    assert refused.value.hint


def test_a_norm_behind_the_rotation_is_seen():
    model = made(transformers.HunYuanDenseV1Config(**SMALL, head_dim=16))
    assert rotary_of(model).style == "half"  # its weights are all 1 as yet, which any rotation passes
    for layer in model.model.layers[1:]:
        layer.self_attn.key_layernorm.weight.data.uniform_(0.5, 2)
    with pytest.raises(BadRotary, match=r"layer 1 .* are not those of position 0, rotated"):
        rotary_of(model)


def test_frequencies_that_lost_their_precision_are_told():
    model = made(transformers.LlamaConfig(**SMALL)).to(torch.bfloat16)
    with pytest.raises(BadRotary, match=r"inv_freq is torch.bfloat16: give the dtype when the model is loaded"):
        rotary_of(model)


def test_a_model_in_training_is_not_asked():
    with pytest.raises(BadRotary, match="training mode"):
        rotary_of(made(transformers.LlamaConfig(**SMALL)).train())


def test_keys_that_are_zero_prove_nothing():
    model = made(transformers.LlamaConfig(**SMALL))
    model.model.layers[1].self_attn.k_proj.weight.data.zero_()
    with pytest.raises(BadRotary, match=r"layer 1 .* are all zero, so they cannot be checked"):
        rotary_of(model)


def test_an_encoder_decoder_is_refused():
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    )
    with pytest.raises(BadRotary, match="does not describe rotary positions"):
        rotary_of(model.eval())
