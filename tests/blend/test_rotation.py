"""Keys rotated to another position are those that the models' own code makes there."""

from __future__ import annotations

import cmath
import importlib
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_blend.errors import BadRotary
from kvf_blend.rotary import Rotary, inverse_frequencies
from tests.support.lazy import torch

pytestmark = pytest.mark.transformers

FURTHEST = 131072


@dataclass(frozen=True)
class Code:
    """`style`: of the stored keys. `model`: its folder in transformers; `name`: what its classes begin with, none where
    angles come from a table. `partial`: whether part of a head may be rotated; `scaled`: whether it knows scalings;
    `furthest`: positions that its tables have."""

    style: str
    model: str
    name: str = ""
    apply: str = "apply_rotary_pos_emb"
    partial: bool = False
    scaled: bool = True
    furthest: int = FURTHEST

    @property
    def module(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")


CODES = {
    code.model: code
    for code in (
        Code("half", "llama", "Llama"),
        Code("half", "gpt_neox", "GPTNeoX", partial=True),
        Code("interleaved", "cohere", "Cohere"),
        Code("interleaved", "glm", "Glm", partial=True),
        Code("interleaved", "deepseek_v2", "DeepseekV2", "apply_rotary_emb"),
        # It reads pairs of neighbours and stores them in halves.
        Code("half", "deepseek_v3", "DeepseekV3", "apply_rotary_pos_emb_interleave"),
        Code("interleaved", "gptj", partial=True, scaled=False, furthest=4096),
    )
}


def embedding(code: Code, rope: dict[str, Any], head_dim: int, rotary_dim: int) -> Any:
    sizes = {"qk_rope_head_dim": head_dim} if "deepseek" in code.model else {}
    config = getattr(code.module, f"{code.name}Config")(
        hidden_size=head_dim * 4, num_attention_heads=4, max_position_embeddings=FURTHEST, rope_parameters=rope, **sizes
    )
    if not sizes:
        config.head_dim = head_dim
    if code.partial:
        factor = 1.0 if rotary_dim == head_dim else (rotary_dim + 0.25) / head_dim
        # Both places: transformers 5.0 reads one or the other, as the scaling is.
        config.rope_parameters["partial_rotary_factor"] = config.partial_rotary_factor = factor
    return getattr(code.module, f"{code.name}RotaryEmbedding")(config)


def stored(code: Code, angles: Any, raw: torch.Tensor, position: int, rotary_dim: int) -> torch.Tensor:
    """`raw` keys, [heads, tokens, head_dim], as the model stores them from `position` on. `angles`: of `embedding`."""
    keys, apply = raw[None], getattr(code.module, code.apply)
    positions = torch.arange(position, position + keys.shape[2])[None]
    if not code.name:
        table = code.module.create_sinusoidal_positions(position + keys.shape[2], rotary_dim)[position:].to(keys.dtype)
        sin, cos = table[None].chunk(2, dim=-1)
        turned = apply(keys[..., :rotary_dim].transpose(1, 2), sin, cos).transpose(1, 2)
        return torch.cat((turned, keys[..., rotary_dim:]), dim=-1)[0]
    made = angles(keys, positions)
    made = made if isinstance(made, tuple) else (made,)
    return apply(keys, keys, *made)[1][0]


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global pairs, rotate_keys
    from kvf_blend.engine.placing import pairs, rotate_keys


SHORT_DTYPES = st.sampled_from(["float16", "bfloat16"]).map(lambda name: getattr(torch, name))
DTYPES = st.builds(lambda: torch.float32) | SHORT_DTYPES
HEADS, TOKENS = 2, 3


@st.composite
def rotations(draw, codes=tuple(CODES)):
    """A model's code with parameters that it may have, as the model names them and as `Rotary` does."""
    code = CODES[draw(st.sampled_from(codes))]
    part = draw(st.sampled_from([4, 16, 64, 80, 128]))
    rotary_dim = draw(st.integers(1, part // 2)) * 2 if code.partial else part
    offset = draw(st.sampled_from([0, 0, 24, 512]))
    scaling = draw(st.sampled_from(["none", "linear", "llama3", "yarn"])) if code.scaled else "none"
    theta = float(draw(st.sampled_from([10000, 500000, 12000000]))) if code.scaled else 10000.0
    factor = {} if scaling == "none" else {"factor": draw(st.sampled_from([1.5, 4.0, 40.0]))}
    original = draw(st.sampled_from([6, 512, 4096, 32768]))
    more = {}
    if scaling == "llama3":
        low = draw(st.sampled_from([0.5, 1.0]))
        more = {"low_freq_factor": low, "high_freq_factor": low * draw(st.sampled_from([2.0, 4.0]))}
    if scaling == "yarn":
        more = {"beta_fast": draw(st.sampled_from([32.0, 8.0])), "beta_slow": draw(st.sampled_from([1.0, 0.5]))}
        more["truncate"] = draw(st.booleans())
    given_by_model = {"rope_type": "default" if scaling == "none" else scaling, "rope_theta": theta, **factor, **more}
    if scaling in ("llama3", "yarn"):
        given_by_model["original_max_position_embeddings"] = more["original_max_position"] = original
    rotary = Rotary(code.style, theta, part + offset, rotary_dim, offset, scaling, **factor, **more)
    return code, given_by_model, part, rotary


def random_keys(dim, dtype, seed):
    return torch.randn(HEADS, TOKENS, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def furthest_apart(one, other, rotary):
    found, expected = (torch.complex(*(part.double() for part in pairs(keys, rotary))) for keys in (one, other))
    return float(((found - expected).abs() / expected.abs().clamp_min(1e-3)).max())


def unrotated(keys, rotary):
    return torch.cat((keys[..., : rotary.offset], keys[..., rotary.offset + rotary.rotary_dim :]), dim=-1)


@settings(max_examples=300)
@given(rotation=rotations(), dtype=DTYPES, place=st.floats(0, 1), goal=st.floats(0, 1), seed=st.integers(0, 2**16))
def test_a_key_rotated_to_a_position_is_the_one_computed_there(rotation, dtype, place, goal, seed):
    code, rope, part, rotary = rotation
    before, after = (int((code.furthest - TOKENS) * share**3) for share in (place, goal))
    angles = embedding(code, rope, part, rotary.rotary_dim) if code.name else None
    latent = random_keys(rotary.offset, dtype, seed + 1)
    raw = random_keys(part, dtype, seed)
    here, there = (
        torch.cat((latent, stored(code, angles, raw, place, rotary.rotary_dim)), dim=-1) for place in (before, after)
    )

    rotated = rotate_keys(here, rotary, after - before)

    assert rotated.dtype == dtype
    assert torch.equal(unrotated(rotated, rotary), unrotated(there, rotary))
    # The rounding of keys, cosines and sines on both sides; and the model's angles, products in float32, are off by up
    # to 2**-24 of the position, its frequencies by up to 2**-21: 0.07 radians at position 131072.
    allowed = 6 * torch.finfo(dtype).eps + (before + after) * 2.0**-24 + abs(after - before) * 2.0**-21
    assert furthest_apart(rotated, there, rotary) <= allowed


@settings(max_examples=150)
@given(rotation=rotations([name for name, code in CODES.items() if code.scaled]))
def test_frequencies_are_the_models_own_to_the_last_bits(rotation):
    code, rope, part, rotary = rotation
    own = embedding(code, rope, part, rotary.rotary_dim).inv_freq
    assert own.dtype == torch.float32
    ours, plain = (
        torch.tensor(inverse_frequencies(kind), dtype=torch.float64)
        for kind in (rotary, Rotary(rotary.style, rotary.theta, rotary.head_dim, rotary.rotary_dim, rotary.offset))
    )
    # Two last places of a float32. What a scaling makes of that is a difference, with the errors of what it began with.
    allowed = 2.0**-22 if rotary.scaling in ("none", "linear") else 2.0**-20
    assert bool(((ours - own.double()).abs() <= allowed * plain).all())


@settings(max_examples=100)
@given(rotation=rotations(), shift=st.integers(-131072, 131072), seed=st.integers(0, 2**16))
def test_angles_are_exact_at_any_distance(rotation, shift, seed):
    """To the rounding of float32 keys: an angle taken in float32 would be off by up to 0.004 radians."""
    rotary = rotation[3]
    keys = random_keys(rotary.head_dim, torch.float32, seed)
    turns = torch.tensor(
        [cmath.exp(1j * shift * frequency) for frequency in inverse_frequencies(rotary)], dtype=torch.complex128
    )
    expected = torch.complex(*(part.double() for part in pairs(keys, rotary))) * turns
    found = torch.complex(*(part.double() for part in pairs(rotate_keys(keys, rotary, shift), rotary)))
    assert float(((found - expected).abs() / expected.abs().clamp_min(1e-3)).max()) < 1e-6


@settings(max_examples=100)
@given(
    rotation=rotations(),
    dtype=DTYPES,
    seed=st.integers(0, 2**16),
    one=st.integers(-131072, 131072),
    other=st.integers(-131072, 131072),
)
def test_shifts_add_up_and_can_be_undone(rotation, dtype, seed, one, other):
    rotary = rotation[3]
    keys = random_keys(rotary.head_dim, dtype, seed)
    moved = rotate_keys(keys, rotary, one)
    rounding = 4 * torch.finfo(dtype).eps
    assert furthest_apart(rotate_keys(moved, rotary, other), rotate_keys(keys, rotary, one + other), rotary) < rounding
    assert furthest_apart(rotate_keys(moved, rotary, -one), keys, rotary) < rounding


@settings(max_examples=60)
@given(rotation=rotations(), dtype=SHORT_DTYPES, seed=st.integers(0, 2**16), shift=st.integers(1, 131072))
def test_short_dtypes_are_rounded_once(rotation, dtype, seed, shift):
    rotary = rotation[3]
    keys = random_keys(rotary.head_dim, dtype, seed)
    assert torch.equal(rotate_keys(keys, rotary, shift), rotate_keys(keys.float(), rotary, shift).to(dtype))


@settings(max_examples=60)
@given(rotation=rotations(), dtype=DTYPES, seed=st.integers(0, 2**16), shift=st.integers(1, 131072))
def test_what_is_not_rotated_keeps_every_bit(rotation, dtype, seed, shift):
    rotary = rotation[3]
    keys = random_keys(rotary.head_dim, dtype, seed)
    keys[..., :: rotary.head_dim - 1] = torch.tensor([-0.0, float("nan")])  # what arithmetic would not keep
    as_they_were = keys.clone()
    bits = torch.int32 if dtype == torch.float32 else torch.int16

    stayed, moved = rotate_keys(keys, rotary, 0), rotate_keys(keys, rotary, shift)

    assert torch.equal(stayed.view(bits), keys.view(bits))
    assert torch.equal(unrotated(moved, rotary).view(bits), unrotated(keys, rotary).view(bits))
    assert torch.equal(keys.view(bits), as_they_were.view(bits))
    assert stayed.data_ptr() != keys.data_ptr() != moved.data_ptr()


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_any_leading_axes_and_strides_will_do(style):
    rotary = Rotary(style, 10000.0, head_dim=16, rotary_dim=8, offset=4)
    paged = torch.randn(5, 2, 4, 3, 32)[..., ::2].transpose(1, 3)  # no two axes of it are next to each other
    moved = rotate_keys(paged, rotary, 7)
    assert moved.shape == paged.shape
    assert torch.equal(moved[2, 1, 3], rotate_keys(paged[2, 1, 3].contiguous(), rotary, 7))
    shared = torch.randn(1, 3, 16).expand(4, 3, 16)  # four heads that are one in memory
    assert torch.equal(rotate_keys(shared, rotary, 7)[3], rotate_keys(shared[0], rotary, 7))
    assert rotate_keys(torch.empty(2, 0, 16), rotary, 7).shape == (2, 0, 16)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 8), "float32"), ((16,), "float32"), ((2, 16), "int8"), ((2, 16), "float64")],
    ids=["another head size", "no tokens axis", "whole numbers", "float64"],
)
def test_other_keys_are_refused(shape, dtype):
    keys = torch.zeros(shape, dtype=getattr(torch, dtype))
    with pytest.raises(BadRotary, match="keys are"):
        rotate_keys(keys, Rotary("half", 10000.0, head_dim=16, rotary_dim=16), 1)


def test_parameters_are_checked_before_keys_are_touched():
    with pytest.raises(BadRotary, match="rotary_dim"):
        rotate_keys(torch.zeros(2, 16), Rotary("half", 10000.0, head_dim=16, rotary_dim=18), 1)
