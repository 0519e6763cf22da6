"""The numbers of docs/sizing.md follow from the parameters that stand beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.doc_tables import rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sizing.md").read_text()
GIB = 1 << 30
MIB = 1 << 20
BF16 = 2


class Model(NamedTuple):
    """A row of the table: its parameters give `nbytes` a token, `said` are its other cells."""

    name: str
    nbytes: int
    said: list[str]


def models() -> list[Model]:
    found = []
    for name, layers, heads, head_dim, *said in rows(PAGE, "Four models, in bfloat16"):
        if head_dim:
            elements = 2 * int(heads) * int(head_dim)
        else:  # MLA: a latent vector and a rotary key
            rank, rope = re.findall(r"\d+", heads)
            elements = int(rank) + int(rope)
        found.append(Model(name, int(layers) * elements * BF16, said))
    return found


def test_there_are_four() -> None:
    assert [model.name for model in models()] == ["Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-32B", "DeepSeek-V3 (MLA)"]


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_a_row_follows_from_its_parameters(model: Model) -> None:
    token, chunk, long_prompt, fits = model.said
    assert int(token) == model.nbytes
    assert chunk == f"{round(256 * model.nbytes / MIB, 1):g} MiB"
    assert long_prompt == f"{round(32768 * model.nbytes / GIB, 1):g} GiB"
    assert int(fits) == 100 * GIB // model.nbytes


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_the_bandwidth_follows_from_its_parameters(model: Model) -> None:
    said = dict(rows(PAGE, "Time and bandwidth"))
    assert said[model.name] == f"{10_000 * model.nbytes / 1e9:.1f} GB/s"


def test_the_examples_are_worked_right() -> None:
    llama = models()[0].nbytes
    assert 8 * 32768 * llama == 32 * GIB
    assert 200 * 8192 == 1638400
    assert 1638400 * llama == 200 * GIB
