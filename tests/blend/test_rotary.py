"""What is said of rotary positions: which parameters are accepted, what they are called, the angles that they give."""

from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import pytest

from kvf_blend.errors import BadRotary
from kvf_blend.rotary import SCALINGS, Rotary, check, fingerprint
from kvframework.errors import KVFrameworkError

PLAIN = Rotary("half", theta=500000.0, head_dim=128, rotary_dim=128)
LINEAR = msgspec.structs.replace(PLAIN, scaling="linear", factor=4.0)
LLAMA3 = msgspec.structs.replace(
    PLAIN, scaling="llama3", factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = msgspec.structs.replace(
    PLAIN, scaling="yarn", factor=40.0, original_max_position=4096, beta_fast=32.0, beta_slow=1.0
)
MLA = Rotary("interleaved", theta=10000.0, head_dim=576, rotary_dim=64, offset=512)
KINDS = {"none": PLAIN, "linear": LINEAR, "llama3": LLAMA3, "yarn": YARN}


@pytest.mark.parametrize("rotary", [*KINDS.values(), MLA, msgspec.structs.replace(YARN, truncate=False)])
def test_what_is_right_is_accepted_and_arrives_as_it_was_sent(rotary):
    check(rotary)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rotary), type=Rotary) == rotary


def test_every_scaling_has_its_row():
    assert set(KINDS) == set(SCALINGS)


@pytest.mark.parametrize(
    ("right", "name", "wrongs"),
    [
        (PLAIN, "style", ["neox", ""]),
        (PLAIN, "plane", ["latent"]),
        (PLAIN, "scaling", ["dynamic", "longrope", "default"]),
        (PLAIN, "theta", [0.0, 1.0, -10000.0, 1e13, math.nan, math.inf]),
        (PLAIN, "head_dim", [0, 1, 65537]),
        (PLAIN, "rotary_dim", [0, -2, 63, 130]),
        (MLA, "rotary_dim", [66]),
        (PLAIN, "offset", [-1, 127]),
        (PLAIN, "factor", [2.0]),
        (PLAIN, "original_max_position", [8192]),
        (PLAIN, "low_freq_factor", [1.0]),
        (PLAIN, "high_freq_factor", [4.0]),
        (PLAIN, "beta_fast", [32.0]),
        (PLAIN, "beta_slow", [1.0]),
        (PLAIN, "truncate", [False]),
        # A parameter that is missing has its default.
        (LINEAR, "factor", [1.0, 0.0, -4.0, math.inf, 1e13]),
        (LINEAR, "original_max_position", [8192]),
        (LLAMA3, "factor", [1.0, 0.5]),
        (LLAMA3, "original_max_position", [0, -8192]),
        (LLAMA3, "low_freq_factor", [0.0, -1.0, math.nan]),
        (LLAMA3, "high_freq_factor", [0.0, 1.0, math.inf]),
        (LLAMA3, "beta_fast", [32.0]),
        (LLAMA3, "beta_slow", [1.0]),
        (YARN, "factor", [1.0, 0.9, math.nan]),
        (YARN, "original_max_position", [0]),
        (YARN, "beta_fast", [0.0, 1.0, math.nan]),
        (YARN, "beta_slow", [0.0, -1.0]),
        (YARN, "low_freq_factor", [1.0]),
        (YARN, "high_freq_factor", [4.0]),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_name(right, name, wrongs):
    for wrong in wrongs:
        with pytest.raises(BadRotary) as refused:
            check(msgspec.structs.replace(right, **{name: wrong}))
        assert refused.value.where == f"rotary.{name}"
        assert refused.value.available
        assert refused.value.hint
        assert repr(wrong) in refused.value.fact


@pytest.mark.parametrize("name", ["style", "theta", "head_dim", "rotary_dim"])
def test_without_a_parameter_that_all_kinds_need_no_payload_is_decoded(name):
    said = msgspec.structs.asdict(PLAIN)
    del said[name]
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Rotary)


@pytest.mark.parametrize(("name", "wrong"), [("theta", "10000"), ("head_dim", 64.5), ("truncate", 1), ("style", None)])
def test_a_parameter_of_another_type_is_refused(name, wrong):
    with pytest.raises(BadRotary, match=name):
        check(msgspec.structs.replace(PLAIN, **{name: wrong}))


def test_the_error_has_its_code():
    assert BadRotary.code == "kvf_blend.rotary"
    assert isinstance(KVFrameworkError.from_code("kvf_blend.rotary", "fact"), BadRotary)


def test_fingerprints_are_stable():
    """Segments lie in L2 under them: another value is another release of the format."""
    assert {name: fingerprint(rotary).hex() for name, rotary in {**KINDS, "mla": MLA}.items()} == {
        "none": "523995ec409c26fc7bcadb80af00ac88",
        "linear": "78e2e24ff6e1dc58d2ded9c6c6dacc6f",
        "llama3": "00039366819d672d6acc9759324fe716",
        "yarn": "08ccdd568a43a69c8ac9ac412238dc3e",
        "mla": "dc5e9a74d62474a060d4eebf73255851",
    }
    # With tokens before segments, too.
    assert fingerprint(YARN, bytes(range(8))).hex() == "c643fece5fca92933a975be7be9c4e90"


@pytest.mark.parametrize(
    "changed",
    [
        {"style": "interleaved"},
        {"theta": 500001.0},
        {"head_dim": 130},
        {"rotary_dim": 126},
        {"offset": 2},
        {"scaling": "llama3"},
        {"factor": 41.0},
        {"original_max_position": 8192},
        {"low_freq_factor": 1.0},
        {"high_freq_factor": 4.0},
        {"beta_fast": 33.0},
        {"beta_slow": 1.5},
        {"truncate": False},
        {"plane": "values"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_field_changes_the_fingerprint(changed):
    assert fingerprint(msgspec.structs.replace(YARN, **changed)) != fingerprint(YARN)


def test_no_field_is_left_out_of_that():
    assert len(msgspec.structs.fields(Rotary)) == 14


def test_whole_numbers_have_the_fingerprint_of_their_floats():
    assert fingerprint(msgspec.structs.replace(YARN, theta=500000, factor=40)) == fingerprint(YARN)


def test_the_server_can_read_them_without_torch():
    code = "import kvf_blend.rotary, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
