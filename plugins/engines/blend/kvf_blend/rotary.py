"""The rotary positions of a model: their parameters, the checks, the fingerprint and the angle that one position adds.
Runs in the engine process and, at registration, in a thread of the server; pure.

A key at position p is its unrotated self turned by p times an angle per pair of elements; a further factor on the keys
(YaRN's attention factor) is in the stored keys already and plays no part here.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Annotated

import msgspec

from kvf_blend.errors import BadRotary
from kvframework.api.plugin import Message

STYLES = ("half", "interleaved")
PLANES = ("keys", "values")
# The parameters that a scaling needs besides theta; it takes no others.
SCALINGS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position", "beta_fast", "beta_slow", "truncate"),
}
# Far above any model: the bounds keep the work of a request small and every number within a float32.
_MOST_ELEMENTS = 65536
_MOST = 1e12

_Word = Annotated[str, msgspec.Meta(max_length=64)]


class Rotary(Message, frozen=True):
    """The rotary positions of a model's keys, the same in all its layers.

    `style` says which elements make a pair: "half", the first of the rotated part with the first of its second half
    (Llama), or "interleaved", neighbours (GPT-J). `head_dim` counts the elements of one head of the stored key,
    `rotary_dim` those of it that are rotated, from `offset` on (MLA: behind the part that has no position). `scaling`
    is one of `SCALINGS`, whose parameters are those of transformers' `rope_parameters` by the same names,
    `original_max_position` in tokens. `plane` names the one of a layer's two stored tensors that is rotated: an engine
    may keep MLA's latent as "keys" and the rotated part as "values". The other tensor has no position.
    """

    style: _Word
    theta: float
    head_dim: int
    rotary_dim: int
    offset: int = 0
    scaling: _Word = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    plane: _Word = "keys"


def check(rotary: Rotary) -> None:
    """Raise `BadRotary`, which names the parameter, unless `rotary` determines exactly one rotation."""
    try:
        msgspec.convert(msgspec.structs.asdict(rotary), Rotary)
    except msgspec.ValidationError as error:
        raise BadRotary(str(error), where="rotary", hint="build Rotary with values of its declared types") from None
    for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        if not math.isfinite(getattr(rotary, name)):
            _refuse(rotary, name, "a finite number")
    if rotary.style not in STYLES:
        _refuse(rotary, "style", ", ".join(STYLES))
    if rotary.plane not in PLANES:
        _refuse(rotary, "plane", ", ".join(PLANES))
    if rotary.scaling not in SCALINGS:
        _refuse(rotary, "scaling", ", ".join(SCALINGS))
    if not 1.0 < rotary.theta <= _MOST:
        _refuse(rotary, "theta", f"above 1, up to {_MOST:g}")
    if not 2 <= rotary.head_dim <= _MOST_ELEMENTS:
        _refuse(rotary, "head_dim", f"2 to {_MOST_ELEMENTS}")
    if not 0 <= rotary.offset <= rotary.head_dim - 2:
        _refuse(rotary, "offset", f"0 to {rotary.head_dim - 2}, within the head")
    if rotary.rotary_dim % 2 or not 2 <= rotary.rotary_dim <= rotary.head_dim - rotary.offset:
        _refuse(rotary, "rotary_dim", f"an even number, 2 to {rotary.head_dim - rotary.offset}, within the head")
    _check_scaling(rotary)


def inverse_frequencies(rotary: Rotary) -> list[float]:
    """Radians that one position adds to each pair, `rotary_dim / 2` of them, of a `rotary` that `check` accepts.

    Rounded to float32 where models round: at position 100,000 the true quotient and a model's differ by a visible
    angle.
    """
    dim = rotary.rotary_dim
    plain = [_single(1.0 / _single(rotary.theta ** _single(index / dim))) for index in range(0, dim, 2)]
    if rotary.scaling == "linear":
        return [_single(frequency / rotary.factor) for frequency in plain]
    if rotary.scaling == "llama3":
        return [_single(_llama3(rotary, frequency)) for frequency in plain]
    if rotary.scaling == "yarn":
        return _yarn(rotary, plain)
    return plain


def fingerprint(rotary: Rotary, before: bytes = b"") -> bytes:
    """16 bytes that are the same, in every process and release, for the same parameters and the same packed tokens
    before every segment only."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvf-blend-rotary")
    digest.update(f"{rotary.style} {rotary.scaling} {rotary.plane} ".encode())
    digest.update(struct.pack("<4q", rotary.head_dim, rotary.rotary_dim, rotary.offset, rotary.original_max_position))
    digest.update(
        struct.pack(
            "<6d?",
            rotary.theta,
            rotary.factor,
            rotary.low_freq_factor,
            rotary.high_freq_factor,
            rotary.beta_fast,
            rotary.beta_slow,
            rotary.truncate,
        )
    )
    digest.update(before)
    return digest.digest()


def _check_scaling(rotary: Rotary) -> None:
    taken = SCALINGS[rotary.scaling]
    others = {name for names in SCALINGS.values() for name in names} - set(taken)
    for field in msgspec.structs.fields(Rotary):
        if field.name in others and getattr(rotary, field.name) != field.default:
            _refuse(rotary, field.name, f"{field.default!r}: scaling {rotary.scaling!r} has no such parameter")
    # A factor of 1 is no scaling: it is written as scaling "none".
    if "factor" in taken and (rotary.factor == 1.0 or not 0.0 < rotary.factor <= _MOST):
        _refuse(rotary, "factor", f"above 0, up to {_MOST:g}, and not 1, which is scaling 'none'")
    if rotary.scaling in ("llama3", "yarn"):
        if rotary.factor < 1.0:
            _refuse(rotary, "factor", f"above 1, up to {_MOST:g}")
        if not 1 <= rotary.original_max_position <= _MOST:
            _refuse(rotary, "original_max_position", "the tokens that the model was first trained on")
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in taken:
            if not 0.0 < getattr(rotary, low) <= _MOST:
                _refuse(rotary, low, f"above 0, up to {_MOST:g}")
            if not getattr(rotary, low) < getattr(rotary, high) <= _MOST:
                _refuse(rotary, high, f"above {low}, {getattr(rotary, low)!r}, up to {_MOST:g}")


def _refuse(rotary: Rotary, name: str, available: str) -> None:
    raise BadRotary(
        f"{name} is {getattr(rotary, name)!r}",
        where=f"rotary.{name}",
        available=available,
        hint="take the parameters from the model's configuration",
    )


def _llama3(rotary: Rotary, frequency: float) -> float:
    """The frequency under Llama 3's scaling: long waves are stretched by the factor, short ones stay, waves between
    them are interpolated."""
    turns = rotary.original_max_position * frequency / (2 * math.pi)
    share = (turns - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    share = min(1.0, max(0.0, share))
    return (1.0 - share) * frequency / rotary.factor + share * frequency


def _yarn(rotary: Rotary, plain: list[float]) -> list[float]:
    """The frequencies under YaRN: as `_llama3`, but interpolated by the pair's index."""

    def index_of(turns: float) -> float:
        waves = math.log(rotary.original_max_position / (turns * 2 * math.pi))
        return rotary.rotary_dim * waves / (2 * math.log(rotary.theta))

    first, last = index_of(rotary.beta_fast), index_of(rotary.beta_slow)
    if rotary.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.rotary_dim - 1)
    if first == last:
        last += 0.001
    stretched = [min(1.0, max(0.0, (index - first) / (last - first))) for index in range(len(plain))]
    return [
        _single(frequency / rotary.factor * share + frequency * (1.0 - share))
        for frequency, share in zip(plain, stretched, strict=True)
    ]


def _single(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded
