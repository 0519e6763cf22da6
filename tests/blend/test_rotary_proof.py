"""What the proof sees in KV that no model of transformers makes, or only in some of its releases."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvf_blend.errors import BadRotary
from kvf_blend.rotary import Rotary
from tests.support.lazy import torch

pytestmark = pytest.mark.transformers


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global rotary_of, rotate_keys
    from kvf_blend.engine.model_rotary import rotary_of
    from kvf_blend.engine.placing import rotate_keys


WHOLE = Rotary("half", 10000.0, head_dim=8, rotary_dim=8)
PART = Rotary("interleaved", 10000.0, head_dim=24, rotary_dim=8)
BEHIND = Rotary("interleaved", 10000.0, head_dim=24, rotary_dim=8, offset=16)
MLA = {"qk_rope_head_dim": 8}
QUARTER = {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1 / 3}}


class Model:
    """What `rotary_of` needs of a model, with layers that a test makes: each a pair of functions of a table of random
    numbers and the positions of the rows."""

    training = False
    device = "cpu"

    def __init__(self, *layers, **config):
        said = {"rope_parameters": {"rope_theta": 10000.0}, **config}
        self.config = SimpleNamespace(vocab_size=97, max_position_embeddings=4096, **said)
        self.layers = layers

    def __call__(self, input_ids, position_ids, past_key_values, use_cache):
        positions = position_ids[:, 0].tolist()
        for index, makers in enumerate(self.layers):
            made = []
            for width, make in makers:
                table = torch.randn(97, 2, 1, width, generator=torch.Generator().manual_seed(width + index))
                rows = table[input_ids[:, 0]]
                made.append(torch.stack([make(row, place) for row, place in zip(rows, positions, strict=True)]))
            past_key_values.update(*made, index)

    def named_buffers(self):
        return iter(())


def still(width):
    return width, lambda row, _: row


def rotated(rotary):
    return rotary.head_dim, lambda row, position: rotate_keys(row, rotary, position)


def shaken(width, at, rotary=None):
    """As `rotated` or `still`, but one element depends on the position."""

    def make(row, position):
        row = rotate_keys(row, rotary, position) if rotary else row.clone()
        row[..., at] += 0.1 * position
        return row

    return width, make


@pytest.mark.parametrize(
    ("layer", "config", "found"),
    [
        ((rotated(BEHIND), still(6)), MLA, BEHIND),
        ((rotated(PART), still(6)), QUARTER, PART),
        ((still(16), rotated(WHOLE)), MLA, Rotary("half", 10000.0, head_dim=8, rotary_dim=8, plane="values")),
    ],
    ids=["behind the latent", "before the rest", "among the values"],
)
def test_the_rotated_part_is_found(layer, config, found):
    assert rotary_of(Model(layer, **config)) == found


@pytest.mark.parametrize(
    ("layers", "config", "why"),
    [
        ([(rotated(WHOLE), shaken(8, 0))], {}, "layer 0 .* its values depend on the position too"),
        ([(rotated(WHOLE), still(8)), (rotated(WHOLE), shaken(8, 7))], {}, "layer 1 .* its values depend"),
        ([(shaken(24, 23, PART), still(8))], QUARTER, "its keys at position 1 are not those"),
        ([(shaken(24, 0, BEHIND), still(8))], MLA, "its keys at position 1 are not those"),
        ([(shaken(16, 3), rotated(WHOLE))], MLA, "layer 0 .* its keys"),
        ([(rotated(WHOLE), still(8)), (rotated(PART), still(8))], {}, "layer 1 .* have 24 elements a head, and 8"),
        ([((8, lambda row, _: row * float("nan")), still(8))], {}, "its keys at position 1 are not those"),
        ([(rotated(WHOLE), (8, lambda row, _: row * float("nan")))], {}, "its values depend on the position too"),
        ([], {}, "the model does not fill a DynamicCache"),
        ([((8, lambda row, _: row.long()), still(8))], {}, "layer 0: keys and values are torch.int64"),
    ],
)
def test_what_does_not_only_rotate_is_refused(layers, config, why):
    with pytest.raises(BadRotary, match=why):
        rotary_of(Model(*layers, **config))


def test_what_a_table_of_positions_does_not_reach_is_not_asked():
    model = Model((rotated(WHOLE), still(8)))
    model.config.max_position_embeddings = 3
    asked = []
    model.layers = ((rotated(WHOLE), (8, lambda row, position: asked.append(position) or row)),)
    assert rotary_of(model) == WHOLE
    assert max(asked) == 2
