"""The engine of a plan: of those that it knows by name, with the KV of their models and their published prefill speeds
and the sources; yours; or the one with numbers of the other. Pure.

The facts are in `catalogue.toml`, read once.
"""

from __future__ import annotations

import functools
import math
from difflib import get_close_matches
from importlib import resources
from typing import Literal, TypeVar

import msgspec

from kvf_plan.errors import PlanError
from kvframework.api.toml import parse_toml

Basis = Literal["measured", "said", "assumed", "yours"]
_ELEMENT_BYTES = 2  # bfloat16
_T = TypeVar("_T")


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's shape; see `catalogue.toml`. `latent` is set for multi-head latent attention, in place of heads."""

    layers: int
    query_heads: int
    active_parameters: float
    gpus: int
    source: str
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    attention_layers: int = 0
    attention_width: int = 0
    mixture: bool = False

    @property
    def bytes_per_token(self) -> int:
        """KV of a token over all ranks, in bfloat16."""
        elements = self.latent or 2 * self.kv_heads * self.head_dim
        return self.layers * elements * _ELEMENT_BYTES

    @property
    def attention_tokens(self) -> float:
        """The context at which attention costs a token as much as all else: A of the prefill formula, by counting
        floating point operations."""
        width = self.attention_width or 2 * self.head_dim
        return self.active_parameters / ((self.attention_layers or self.layers) * self.query_heads * width)


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense bfloat16 peak in 10^12 operations a second."""

    peak_tflops: float
    source: str


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of prompts a second of one engine of so many GPUs, at prompts of `prompt_tokens`."""

    model: str
    gpu: str
    gpus: int
    tokens_per_s: float
    prompt_tokens: int
    basis: Basis
    note: str
    source: str


class _Assumed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dense: float
    mixture: float


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: dict[str, Model]
    gpus: dict[str, Gpu]
    speeds: list[Speed]
    assumed: _Assumed


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: `tokens_per_s` is r and `attention_tokens` A of `C(x, y) = ((y - x) + (y^2 - x^2) / 2A) / r`, A 0:
    no attention term. `gpus` are those of this engine."""

    name: str
    gpu: str
    gpus: int
    tokens_per_s: float
    attention_tokens: float
    bytes_per_token: int
    basis: Basis
    note: str
    source: str

    @property
    def words(self) -> str:
        """The model and its GPUs, for people; the GPUs only where they are known."""
        return f"{self.name} on {self.gpus} {self.gpu}" if self.gpu else self.name


@functools.cache
def catalogue() -> Catalogue:
    """Return the facts. Reads the file of this package at the first call."""
    text = resources.files(__package__).joinpath("catalogue.toml").read_text()
    return msgspec.convert(parse_toml(text, where="catalogue.toml"), Catalogue)


def engine(model: str, gpu: str, gpus: int = 0) -> Engine:
    """Return an engine of `gpus` GPUs, 0: as many as the speed was published for. Raises `PlanError` for an unknown
    name."""
    known = catalogue()
    shape = _named(known.models, model, "--engine")
    peak = _named(known.gpus, gpu, "--gpu").peak_tflops
    found = next((each for each in known.speeds if (each.model, each.gpu) == (model, gpu)), None)
    a = shape.attention_tokens
    if found is None:
        gpus = gpus or shape.gpus
        share = known.assumed.mixture if shape.mixture else known.assumed.dense
        r = gpus * share * peak * 1e12 / (2 * shape.active_parameters)
        basis: Basis = "assumed"
        note, source = f"{share:.0%} of the peak of {gpus} {gpu}, as no published speed is known", shape.source
    else:
        # What was measured is the mean over a prompt, with its attention.
        r = found.tokens_per_s * (1 + found.prompt_tokens / (2 * a))
        basis, note, source = found.basis, found.note, found.source
        if gpus not in (0, found.gpus):
            r *= gpus / found.gpus
            basis, note = "assumed", f"{gpus / found.gpus:g} times the speed of {found.gpus} {gpu}: {note}"
        gpus = gpus or found.gpus
    return Engine(
        name=model,
        gpu=gpu,
        gpus=gpus,
        tokens_per_s=r,
        attention_tokens=a,
        bytes_per_token=shape.bytes_per_token,
        basis=basis,
        note=note,
        source=source,
    )


def _named(known: dict[str, _T], name: str, where: str) -> _T:
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=1)
    raise PlanError(
        f"{name!r} is not in the catalogue",
        where=where,
        available=", ".join(known),
        hint=f"did you mean {near[0]!r}?"
        if near
        else "give your engine's values: --prefill TOKENS/S and --bytes-per-token SIZE",
    )


def engine_of(
    model: str,
    gpu: str,
    gpus: int,
    prefill: float | None,
    attention_tokens: float | None,
    bytes_per_token: int | None,
) -> Engine:
    """Return it; "" and None: not given. Raises `PlanError` if the speed or the KV of a token is unknown."""
    if prefill is not None and not 0 < prefill < math.inf:
        raise PlanError(
            f"the prefill rate is {prefill} tokens per second", where="--prefill", available="a positive number"
        )
    if attention_tokens is not None and not 0 <= attention_tokens < math.inf:
        raise PlanError(
            f"the context length is {attention_tokens} tokens", where="--attention", available="a number, or 0 for none"
        )
    if model and gpu:
        known = engine(model, gpu, gpus)
    elif prefill is None or not bytes_per_token:
        unknown = ["the engine's speed"] * (prefill is None) + ["the KV of a token"] * (not bytes_per_token)
        raise PlanError(
            f"not known: {' and '.join(unknown)}",
            where="kvframework plan",
            available="--engine MODEL --gpu GPU, or --prefill TOKENS/S --bytes-per-token SIZE",
            hint="`kvframework plan --catalogue` shows the known models and GPUs",
        )
    else:
        known = Engine(
            name=model or "your engine",
            gpu=gpu,
            gpus=max(gpus, 1),
            tokens_per_s=prefill,
            attention_tokens=0.0,
            bytes_per_token=bytes_per_token,
            basis="yours",
            note="--prefill",
            source="",
        )
    if prefill is not None:
        known = msgspec.structs.replace(known, tokens_per_s=prefill, basis="yours", note="--prefill", source="")
    if attention_tokens is not None:
        known = msgspec.structs.replace(known, attention_tokens=attention_tokens)
    return msgspec.structs.replace(known, bytes_per_token=bytes_per_token) if bytes_per_token else known
